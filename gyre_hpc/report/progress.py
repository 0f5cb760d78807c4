"""The live display of a run: steps, score, what every cell does now, tokens/s, executions. Reads files only, so any process can show it.

Decoration: nothing depends on it, and it must never end a run.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre_hpc.controller.live import read_live
from gyre_hpc.events import EventTail
from gyre_hpc.paths import RunPaths
from gyre_hpc.viewing import see

PERIOD = 0.5
BOXES = 12
"""Cells up to which each has its number and its role."""
SQUARES = 64
"""Cells in one line of squares."""
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"rollout": "cyan", "training": "magenta", "leaving": "yellow", "returning": "yellow"}


def watch(paths: RunPaths, stop: threading.Event, console: Console | None = None) -> None:
    """Show the run until `stop` is set or the run has ended."""
    view = View(paths)
    with Live(view.render(), console=console, refresh_per_second=4, transient=False) as live:
        while not stop.wait(PERIOD):
            view.refresh()
            live.update(view.render())
            if view.ended:
                break
        view.refresh()
        live.update(view.render())


class View:
    """What is shown; `refresh` reads what is new."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.ended = ""
        self._tail = EventTail(paths.events)
        self._scores: list[float] = []
        self._last: dict[str, Any] = {}
        self._endings: dict[str, int] = {}
        self._transfers = 0
        self._notes: deque[str] = deque(maxlen=3)
        self._live: dict[str, Any] = {}
        config = see(paths.config).config
        self._steps = 0 if config.upstream.urls else config.run.steps
        """0: a gateway alone, which has no steps and no cells."""

    def refresh(self) -> None:
        for event in self._tail.read():
            self._take(event)
        self._live = read_live(self.paths.live) or self._live

    def _take(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "run.start":
                self.ended = ""
                self._notes.append(f"attempt {event.get('attempt', 1)} started")
            case "run.end":
                self.ended = str(event.get("status", "ended"))
            case "step.end":
                del self._scores[int(event["step"]) - 1 :]
                self._scores.append(float(event["score_mean"]))
                self._last = event
            case "steps.again":
                del self._scores[int(event["step"]) :]
            case "transfer":
                self._transfers += 1
                self._notes.append(
                    f"cell {event['cell']}: {event['from']} → {event['to']} in {event['seconds']:.2f} s, {event.get('live', 0)} live"
                )
            case "execution.end":
                self._endings[event["reason"]] = self._endings.get(event["reason"], 0) + 1
            case "warning.fork":
                self._notes.append(f"execution {event['execution']}: a fork that nothing explains ({event['difference']})")
            case "failure":
                self._notes.append(f"failure: {event['what']}")

    def render(self) -> Panel:
        live = self._live
        step, steps = len(self._scores), self._steps
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(1, steps), completed=step, width=30), f"{step}/{steps}", f"{self._last.get('seconds', 0):.1f} s/step"
        )
        if steps:
            grid.add_row("steps", bar)
            grid.add_row("score", Text(self._spark()))
            grid.add_row("cells", _roles(live.get("roles", [])))
        counts = live.get("executions", {})
        grid.add_row("executions", f"{counts.get('live', 0)} live, {counts.get('queued', 0)} queued, {counts.get('finished', 0)} finished")
        endings = ", ".join(f"{count} {reason}" for reason, count in sorted(self._endings.items(), key=lambda item: -item[1]))
        grid.add_row("endings", endings or "none yet")
        grid.add_row("engines", f"{live.get('tokens_per_second', 0):.0f} tokens/s, {live.get('calls', {}).get('held', 0)} calls held")
        if steps:
            grid.add_row("transfers", f"{self._transfers}, staleness {self._last.get('staleness_mean', 0):.2f}")
        notes = Text("\n".join(self._notes), style="dim")
        title = f"gyre {self.paths.root}" + (f": {self.ended}" if self.ended else "")
        return Panel(Group(grid, notes), title=title, title_align="left", border_style="blue", width=96)

    def _spark(self) -> str:
        if not self._scores:
            return "no step yet"
        bars = "".join(_BARS[max(0, min(7, int(score * 8)))] for score in self._scores[-48:])
        return f"{bars} {self._scores[0]:.2f} → {self._scores[-1]:.2f}"


def _roles(roles: Sequence[str]) -> Text:
    """A box a cell; of many cells a square each, in lines of 64, and how many are in each role."""
    text = Text()
    if len(roles) <= BOXES:
        for cell, role in enumerate(roles):
            text.append(f" {cell} {role} ", style=f"black on {_COLOURS.get(role, 'white')}")
            text.append(" ")
        return text
    for role, count in Counter(roles).most_common():
        text.append("■ ", style=_COLOURS.get(role, "white"))
        text.append(f"{count} {role}  ")
    for cell, role in enumerate(roles):
        text.append("\n" if cell % SQUARES == 0 else "")
        text.append("■", style=_COLOURS.get(role, "white"))
    return text
