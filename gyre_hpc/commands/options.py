"""Arguments and options that several commands take, each defined once.

Invariant: a set of options that always go together is one frozen dataclass; a command takes it as one parameter, and `unfolded` shows the
command line its fields in its place, in their order. Imports nothing heavy: `gyre --help` reads this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from gyre_hpc.simulation.handover import How

if TYPE_CHECKING:
    from gyre_hpc.simulation.trouble import Trouble

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or the directory of a run to continue.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Values that replace those of the file.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A run directory, or a folder of trees.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")]


@dataclass(frozen=True)
class TroubleOptions:
    """What a simulated run is in for (simulation/trouble.py)."""

    node_mtbf: Annotated[float, typer.Option(min=0.0, help="Mean hours between failures of one node (0: none fails).")] = 0.0
    preempt_every: Annotated[float, typer.Option(min=0.0, help="Hours after which an allocation ends (0: it doesn't).")] = 0.0
    restart: Annotated[float, typer.Option(min=0.0, help="Minutes from a failure or an allocation's end to the next attempt.")] = 10.0
    executions_survive: Annotated[bool, typer.Option("--executions-survive", help="Running executions go on in the next attempt.")] = False
    checkpoint: Annotated[float, typer.Option(min=0.0, help="Seconds of a checkpoint, beside what a run's own took.")] = 0.0
    engine_mtbf: Annotated[float, typer.Option(min=0.0, help="Mean hours between deaths of one node's engine (0: none dies).")] = 0.0
    engine_start: Annotated[float, typer.Option(min=0.0, help="Minutes until an engine that died is back.")] = 2.0
    handover: Annotated[How | None, typer.Option(help="How executions move with their context, for its cost (none: as recorded).")] = None
    context_tokens: Annotated[float, typer.Option(min=0.0, help="Tokens that an execution holds when it moves.")] = 0.0
    kv_bytes: Annotated[float, typer.Option(min=0.0, help="Bytes of KV of one token (nixl).")] = 0.0
    link: Annotated[float, typer.Option(min=0.0, help="GB/s that one node sends (nixl).")] = 0.0
    prefill: Annotated[float, typer.Option(min=0.0, help="Tokens/s that one node computes (recompute).")] = 0.0

    def trouble(self) -> Trouble:
        """What they say. Raises ConfigError for an option that is missing, or would have no effect."""
        from gyre_hpc.simulation.handover import hand_over
        from gyre_hpc.simulation.trouble import trouble

        check_numbers(**vars(self))
        kv = hand_over(self.handover, self.context_tokens, self.kv_bytes, self.link, self.prefill)
        faults = (self.node_mtbf, self.preempt_every, self.restart, self.executions_survive)
        return trouble(*faults, self.checkpoint, self.engine_mtbf, self.engine_start, kv)


_MOST = 1e12


def check_numbers(**options: object) -> None:
    """Raises ConfigError for a number that no arithmetic is made for: `inf` passes every lower bound."""
    from gyre_hpc.errors import ConfigError

    for name, value in options.items():
        if isinstance(value, float) and not value <= _MOST:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}", f"give at most {_MOST:g}")


Result = TypeVar("Result")


def unfolded(command: Callable[..., Result]) -> Callable[..., Result]:
    """The command as the command line sees it: a parameter that is a dataclass is the options that its fields are.

    Raises TypeError for a field without a default.
    """
    seen: list[inspect.Parameter] = []
    sets: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            sets[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            if bare := [field.name for field in fields(kind) if field.default is MISSING]:
                raise TypeError(f"{kind.__name__}.{bare[0]} is an option without a default")
            seen += [_keyword(field.name, hints[field.name], field.default) for field in fields(kind)]
        else:
            seen.append(_keyword(parameter.name, kind, parameter.default))

    @wraps(command)
    def call(**given: Any) -> Result:
        made = {name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in sets.items()}
        return command(**given, **made)

    call.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    return call


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
