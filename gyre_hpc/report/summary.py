"""What the event log says about a run, as plain frozen data; pure, fed with events in `seq` order.

Invariants: a step counts once (after a crash a step may be logged by the next attempt; the last word stands), and no more once its weights
are given up; in every attempt a cell is "starting" until the engines are up, then in rollout; a role that an attempt did not end is cut at
that attempt's last event, and what comes behind the last step of a run that is done is its "ending". Times are seconds since the first
attempt began and decoration: the order is that of `seq`. What is written while nothing runs (a configuration that is changed for the next
attempt, a job that came to no attempt) has no time: it neither begins a run nor makes one longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre_hpc.report.placement import describe

Event = Mapping[str, Any]
_STARTING, _ENDING = "starting", "ending"
_TIMELESS = frozenset({"config.change"})


@dataclass(frozen=True)
class Span:
    """One cell in one state ("starting", "rollout", "training", "transfer" or "ending"; "down" where a simulated run failed), seconds."""

    cell: int
    state: str
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """One role transfer; `live` executions that ran meanwhile."""

    cell: int
    to: str
    at: float
    seconds: float
    live: int
    moved: int
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Summary:
    """Everything that the status and the report show of the events."""

    steps: tuple[Event, ...] = ()
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    endings: Mapping[str, int] = field(default_factory=dict)
    scores: tuple[tuple[float, float], ...] = ()
    """(time, score) of every valid execution."""
    lost: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Event, ...] = ()
    attempts: tuple[float, ...] = ()
    """Start of each attempt."""
    cells: int = 0
    standalone: int = 0
    """Nodes of the last attempt that only roll out."""
    zero: float = 0.0
    """Clock of the first event of the first attempt."""
    seconds: float = 0.0
    """From there to the last event of the last attempt."""
    rests: tuple[tuple[float, float], ...] = ()
    """(start, end) of the times between attempts, when nothing ran."""
    tokens: int = 0
    calls: int = 0
    ended: str = ""
    checkpoint: int = 0
    warnings: int = 0
    """Forks that nothing explains."""
    placement: tuple[str, ...] = ()
    """Lines about where the last attempt's cells are and what they hold."""

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def live_transfers(self) -> int:
        """Transfers that happened while executions were live."""
        return sum(1 for transfer in self.transfers if transfer.live > 0)

    @property
    def ran(self) -> float:
        """Seconds in which attempts ran."""
        return self.worked(self.seconds)

    def worked(self, at: float) -> float:
        """Seconds in which attempts had run by then: the time without the rests between them."""
        return at - sum(min(end, at) - start for start, end in self.rests if start < at)

    def share(self, state: str) -> float:
        """Of the cells' time, how much was spent in this state; 0 with no time at all."""
        total = sum(span.end - span.start for span in self.spans)
        return sum(span.end - span.start for span in self.spans if span.state == state) / total if total else 0.0


def duration(seconds: float) -> str:
    """For people: seconds up to ten minutes, then minutes, from two hours on hours."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def summarise(events: Iterable[Event]) -> Summary:
    """Read a whole log, or what there is of it."""
    reading = _Reading()
    for event in events:
        reading.take(event)
    return reading.result()


class _Reading:
    def __init__(self) -> None:
        self.zero: float | None = None
        self.now = 0.0
        self.steps: dict[int, Event] = {}
        self.spans: list[Span] = []
        self.open: dict[int, tuple[str, float]] = {}
        self.transfers: list[Transfer] = []
        self.endings: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.scores: list[tuple[float, float]] = []
        self.failures: list[Event] = []
        self.attempts: list[float] = []
        self.rests: list[tuple[float, float]] = []
        self.cells = self.tokens = self.calls = self.checkpoint = self.warnings = 0
        self.ended = ""
        self.worked = 0.0
        """When the last step, checkpoint or publication was over."""
        self.start: Event = {}
        self.engines: Event = {}
        self.tells = False
        """This log has said when engines were up."""

    def take(self, event: Event) -> None:
        if event["kind"] in _TIMELESS:
            return
        if event["kind"] == "failure" and event.get("attempt", self.start.get("attempt")) != self.start.get("attempt"):
            self.failures.append(event)  # of a job that came to no attempt
            self.ended = self.ended if self.attempts else "failed"
            return
        t = float(event["t"])
        self.zero = t if self.zero is None else self.zero
        at = max(self.now, t - self.zero)
        match event["kind"]:
            case "run.start":
                self._cut()
                if self.attempts and at > self.now:
                    self.rests.append((self.now, at))
                self.now = at
                self.ended = ""
                self.start, self.engines = event, {}
                self.attempts.append(at)
                cells = event.get("cells", 0)
                self.cells = max(self.cells, len(cells) if isinstance(cells, list) else int(cells or 0))
                self.open = dict.fromkeys(range(self.cells), (_STARTING, at))
            case "engines":
                self.engines, self.tells = event, True
                self._started(at)
            case "transfer":
                self._started(None)
                self._transfer(event, at)
            case "step.end":
                self.steps[int(event["step"])] = event
                self.worked = at
            case "publish":
                self.worked = at
            case "steps.again":
                self.steps = {number: step for number, step in self.steps.items() if number <= int(event["step"])}
            case "execution.end":
                if not self.tells:  # else it may be one that an earlier attempt had no time to tell
                    self._started(None)
                self.endings[str(event["reason"])] += 1
                self.tokens += int(event.get("tokens", 0))
                self.calls += int(event.get("calls", 0))
                if event.get("valid", True):
                    self.scores.append((at, float(event["score"])))
            case "execution.lost":
                self.lost[str(event.get("reason", "lost"))] += 1
            case "checkpoint" | "resume":
                self.checkpoint = int(event["step"])
            case "failure":
                self.failures.append(event)
            case "warning.fork":
                self.warnings += 1
            case "run.end":
                self.ended = str(event.get("status", "ended"))
                if self.ended == "done":
                    self._end(at)
        self.now = at

    def _started(self, at: float | None) -> None:
        """Cells that were starting are in rollout, from `at` on; None: a log that does not tell has them there from the first."""
        for cell, (state, since) in self.open.items():
            if state == _STARTING:
                self.open[cell] = ("rollout", since if at is None else at)
                if at is not None and at > since:
                    self.spans.append(Span(cell, state, since, at))

    def _transfer(self, event: Event, at: float) -> None:
        cell, seconds = int(event["cell"]), float(event["seconds"])
        began = max(0.0, at - seconds)
        state, since = self.open.get(cell, (str(event["from"]), began))
        self.spans.append(Span(cell, state, since, max(since, began)))
        self.spans.append(Span(cell, "transfer", max(since, began), at))
        self.open[cell] = (str(event["to"]), at)
        self.cells = max(self.cells, cell + 1)
        self.transfers.append(
            Transfer(
                cell, str(event["to"]), began, seconds, int(event.get("live", 0)), int(event.get("moved", 0)), dict(event.get("phases", {}))
            )
        )

    def _end(self, at: float) -> None:
        """Nobody rolls out or trains any more once the last step is done, whatever role the cells have."""
        for cell, (state, since) in self.open.items():
            if state != _STARTING and self.worked > since:
                self.spans.append(Span(cell, state, since, self.worked))
                self.open[cell] = (_ENDING, self.worked)

    def _cut(self) -> None:
        for cell, (state, since) in sorted(self.open.items()):
            if self.now > since:
                self.spans.append(Span(cell, state, since, self.now))
        self.open = {}

    def result(self) -> Summary:
        self._cut()
        return Summary(
            steps=tuple(self.steps[step] for step in sorted(self.steps)),
            spans=tuple(self.spans),
            transfers=tuple(self.transfers),
            endings=dict(self.endings.most_common()),
            scores=tuple(self.scores),
            lost=dict(self.lost),
            failures=tuple(self.failures),
            attempts=tuple(self.attempts),
            cells=self.cells,
            standalone=len(self.start.get("standalone") or ()),
            zero=self.zero or 0.0,
            seconds=self.now,
            rests=tuple(self.rests),
            tokens=self.tokens,
            calls=self.calls,
            ended=self.ended,
            checkpoint=self.checkpoint,
            warnings=self.warnings,
            placement=tuple(describe(self.start, self.engines)),
        )
