"""What commands print: JSON for programs, lines and tables for people.

Invariants: results go to standard output, whole (a pipe has no width, so nothing is cut off there); how far a computation is goes to
standard error, where it is in nobody's way.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import typer

Found = TypeVar("Found")


def print_json(value: Any) -> None:
    """One line; what JSON has no form for stands there as text."""
    typer.echo(json.dumps(value, default=str))


def show(found: Found, as_json: bool, render: Callable[[Found], str], plain: Callable[[Found], Any] = lambda found: found) -> None:
    """One result: as JSON (of what `plain` makes of it), or as the text that `render` makes."""
    if as_json:
        print_json(plain(found))
    else:
        typer.echo(render(found))


def pairs(found: dict[str, Any]) -> str:
    """A line for each key, the values in one column."""
    width = max(map(len, found), default=0)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in found.items())


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """A table; the columns are the first row's keys."""
    if as_json or not rows:
        show(rows, as_json, lambda _: "nothing yet")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)
    console.print(table)


class Progress:
    """What a long computation is at: a line a second for a person at a terminal, for anybody else one in ten seconds."""

    def __init__(self) -> None:
        self._each = 1.0 if sys.stderr.isatty() else 10.0
        self._told = time.monotonic() - (self._each if sys.stderr.isatty() else 0.0)

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._told >= self._each:
            print(f"... {line}", file=sys.stderr, flush=True)
            self._told = now
