"""What `gyre gateway` shows: lines for people, and one line that tells what is recorded now. Decoration: it never ends a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

PERIOD = 0.5


class Screen:
    """`live`: standard output is a terminal that can draw; else only lines are printed."""

    def __init__(self, live: bool, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False)
        self._console.file.flush()

    async def follow(self, counts: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the line up to date, for ever."""
        rate = Rate()
        while True:
            now = counts()
            if self._live is not None and now:
                self._live.update(Text(describe(now, rate.of(int(now["tokens"]), asyncio.get_running_loop().time()))))
            await asyncio.sleep(PERIOD)


class Rate:
    """Tokens a second over the last few looks."""

    def __init__(self, looks: int = 10) -> None:
        self._seen: list[tuple[float, int]] = []
        self._looks = looks

    def of(self, tokens: int, now: float) -> float:
        """The rate until `now` (seconds), when `tokens` were sampled in all."""
        self._seen = [*self._seen[-self._looks :], (now, tokens)]
        (then, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - then) if last > then else 0.0


def describe(counts: Mapping[str, Any], rate: float) -> str:
    """One line."""
    paused = ", paused" if counts["paused"] else ""
    return (
        f"{counts['live']} live, {counts['finished']} finished; {counts['in_flight']} calls in flight, {counts['held']} held{paused}; "
        f"{counts['tokens']} tokens, {rate:.0f}/s; weights {counts['version']}"
    )
