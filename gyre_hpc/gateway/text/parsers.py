"""Which parser reads what the policy wrote: `model.tool_parser` and `model.reasoning_parser`, by name.

`hermes` and `think` are ours: they stream, are strict and import nothing. Every other name is one of vLLM's registries, taken as it is
(library.py); a model family's format is its business, so there is no table of formats here. Invariants: a wrong name is refused before
anything is started, with the nearest valid ones, and without importing vLLM (4 s of CPU and 400 MB in the gateway: only who chooses such a
parser pays); `none` as reasoning parser means that thoughts are text.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text.toolcalls import PieceParser, ToolCallParser

if TYPE_CHECKING:
    from gyre_hpc.gateway.text.library import Library

HERMES, THINK, NONE = "hermes", "think", "none"
_TABLES = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
_OURS = {"tool_parser": (HERMES,), "reasoning_parser": (THINK, NONE)}


@dataclass(frozen=True)
class Parsers:
    """Makes the parser of each call. `thoughts`: our own reading of `<think>`; `library`: vLLM's, else Hermes calls."""

    thoughts: bool = True
    library: Library | None = None

    def start(self, prefix: str, tools: Sequence[Mapping[str, Any]], thinking: bool) -> PieceParser:
        """The parser of one answer. `prefix` makes the ids of its tool calls; `tools`: neutral definitions (canonical.py)."""
        if self.library is None:
            return ToolCallParser(prefix, thinking and self.thoughts, self.thoughts)
        return self.library.start(prefix, tools, thinking, self.thoughts)

    @property
    def slow(self) -> bool:
        """Reading an answer to its end may take long enough to be done beside the event loop."""
        return self.library is not None


OURS = Parsers()


def make_parsers(tool: str, reasoning: str, directory: Path) -> Parsers:
    """The parsers of these names for the model in `directory`. ConfigError: unknown, vLLM is lacking, or they don't fit its tokenizer."""
    check_names(tool, reasoning)
    if tool == HERMES and reasoning in (THINK, NONE):
        return Parsers(reasoning == THINK)
    from gyre_hpc.gateway.text.library import Library

    ours = reasoning in (THINK, NONE)
    return Parsers(reasoning == THINK, Library(tool, None if ours else reasoning, directory))


def check_names(tool: str, reasoning: str) -> None:
    """Refuse names that the installed vLLM doesn't know. Without vLLM nothing is known: `make_parsers` refuses then. ConfigError."""
    for key, name in (("tool_parser", tool), ("reasoning_parser", reasoning)):
        if name in _OURS[key]:
            continue
        known = registered(key)
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, dict.fromkeys([*_OURS[key], *known]), 3, 0.5)
            guess = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(f"model.{key} = {name} is no parser", f"{guess}valid: {', '.join(dict.fromkeys([*_OURS[key], *known]))}")


@cache
def registered(key: str) -> tuple[str, ...] | None:
    """vLLM's names for `tool_parser` or `reasoning_parser`, read out of its source; None: it is not installed, or keeps them elsewhere."""
    folder, table = _TABLES[key]
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / folder / "__init__.py"
    try:
        module = ast.parse(path.read_text())
    except (OSError, SyntaxError):
        return None
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and getattr(node.targets[0], "id", "") == table:
            return tuple(sorted(str(k.value) for k in node.value.keys if isinstance(k, ast.Constant)))
    return None
