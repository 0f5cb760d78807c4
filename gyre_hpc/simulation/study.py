"""What `gyre simulate` shows is made of: parameters with their source, rows, ratios, and the studies that hold them; frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cells.events import Mode, Schedule
from gyre_hpc.simulation.handover import GIGA, HandOver, How
from gyre_hpc.simulation.scenario import HOUR, Scenario, beyond, cut
from gyre_hpc.simulation.trouble import Trouble
from gyre_hpc.simulation.workload import Limits, LogNormal


@dataclass(frozen=True)
class Parameter:
    """One number that goes into the simulated rows."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Row:
    """One configuration: `reported` hours, or None where the paper has none; `fitted`: whether a parameter was fitted to it; `calm`: the
    same without the faults that `scenario` has."""

    id: str
    what: str
    reported: float | None
    scenario: Scenario
    fitted: bool = False
    calm: Scenario | None = None


@dataclass(frozen=True)
class Ratio:
    """A reported range of hours(`over`) / hours(`under`), and the rows whose hours it compares."""

    id: str
    low: float
    high: float
    over: Row
    under: Row
    how: str = "predicted"


@dataclass(frozen=True)
class Study:
    """All that one `gyre simulate NAME` shows."""

    name: str
    title: str
    parameters: tuple[Parameter, ...]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    tuned: tuple[Row, ...]
    """Candidates for the best Async + streaming at equal staleness."""
    sweep: tuple[tuple[str, float, Row, Row], ...]
    """(parameters that hold, slot load, row, base row): hours of both, and their ratio."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Maker:
    """Scenarios that differ in their schedule only."""

    values: Mapping[str, float]
    nodes: int
    limits: Limits
    changes: Mapping[str, Any]
    window: bool = True

    def __call__(
        self,
        mode: Mode,
        cells: int,
        phi: float,
        mu: int,
        steps: int,
        standalone: int = 0,
        streaming: bool = True,
        load: float | None = None,
    ) -> Scenario:
        v = self.values
        groups, size = int(v["groups_per_step"]), int(v["group_size"])
        schedule = Schedule((1,), groups, size, phi, mu, steps, mode=mode, streaming=streaming, join_late=True)
        schedule, window = replace(schedule, **self.changes), None
        if self.window:
            schedule, window = beyond(schedule, steps)
        slots = (load if load is not None else v["slot_load"]) * groups * size / self.nodes
        workload = LogNormal(v["mean"] * HOUR, v["task_spread"], v["group_spread"], self.limits, v.get("skips", 0.0))
        made = cut(schedule, self.nodes, cells, slots, v["train_step"] * HOUR / groups, workload, standalone, v["beta"])
        costs = replace(made.costs, to_training=v["to_training"], to_rollout=v["to_rollout"])
        return replace(made, costs=costs, window=window)


def _given(kv: HandOver) -> tuple[Parameter, ...]:
    """A hand-over's numbers, which nobody has reported."""
    if not kv.any:
        return ()
    context = Parameter("context_tokens", kv.context, "tokens", "given: what an execution holds when it moves")
    if kv.how is How.RECOMPUTE:
        return context, Parameter("prefill", kv.prefill, "tokens/s", "given: that one node computes")
    return (
        context,
        Parameter("kv_bytes", kv.kv_bytes, "B/token", "given: KV of one token"),
        Parameter("link", kv.link / GIGA, "GB/s", "given: that one node sends"),
    )


def under(study: Study, expected: Trouble) -> Study:
    """The study with the trouble that every one of its runs is in for."""
    if not expected.any:
        return study

    def row(of: Row) -> Row:
        return replace(of, scenario=expected.put(of.scenario), reported=None, fitted=False, calm=of.scenario)

    return replace(
        study,
        title=f"{study.title}; {expected.words()}",
        parameters=study.parameters + _given(expected.kv),
        rows=tuple(row(r) for r in study.rows),
        ratios=tuple(replace(r, over=row(r.over), under=row(r.under)) for r in study.ratios),
        tuned=tuple(row(r) for r in study.tuned),
        sweep=tuple((name, load, row(over), row(base)) for name, load, over, base in study.sweep),
    )
