"""The configuration of a run that is only looked at: another version of gyre may have frozen it.

Invariant: what this version does not take (a key that is gone, a value that is no longer allowed) is left out and named, and never
keeps anybody from seeing a run; whoever would run with it loads it strictly (gyre_hpc/configfile.py) and is refused. What was left out has
its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gyre_hpc.config import Config
from gyre_hpc.configfile import check, read_tree


@dataclass(frozen=True)
class Seen:
    """`left_out`: dotted keys of the file, in its order."""

    config: Config
    left_out: tuple[str, ...] = ()
    empty: bool = False
    """The file says nothing at all: it was lost."""

    @property
    def warning(self) -> str | None:
        """One line for a person, if anything was left out, or lost."""
        if self.empty:
            return "config.yaml is empty, what it said is lost"
        if not self.left_out:
            return None
        several = "these keys" if len(self.left_out) > 1 else "this key"
        return f"config.yaml is of another version of gyre, {several} can't be read: {', '.join(self.left_out)}"


def see(path: Path) -> Seen:
    """Read RUN/config.yaml. Raises ConfigError where it can't be read, or is no YAML with sections."""
    tree = read_tree(path)
    left_out: list[str] = []
    while True:
        try:
            return Seen(Config.model_validate(tree), tuple(left_out), empty=not tree and not left_out)
        except ValidationError as error:
            gone = [_take_out(tree, mistake["loc"]) for mistake in error.errors()]
            left_out += dict.fromkeys(key for key in gone if key)
            if not any(gone):  # not a matter of single keys: the strict reading says what it is
                return Seen(check(tree, str(path)))


def _take_out(tree: dict[str, Any], where: Sequence[str | int]) -> str:
    """Remove what a mistake is about, or what it is in; its dotted key, empty if it is gone already."""
    at: Any = tree
    for depth, name in enumerate(where):
        if not isinstance(at, dict) or name not in at:
            return ""
        if depth == len(where) - 1 or not isinstance(at[name], dict) or not at[name]:
            del at[name]
            return ".".join(map(str, where[: depth + 1]))
        at = at[name]
    return ""
