"""What one run of benchmarks/policies.py measured, and what the simulator says of it from that run's own durations.

Time counts from the start of the first execution to the end of the last step: what comes before is the start of processes on two cores.

Idle is counted as the simulator does (gyre_hpc/simulation/outcome.py): a cell in rollout is busy by the share of its places that is in
use, a cell in training while it computes, in transfer never. The event log tells roles, executions and a step's training seconds, but not
which cell an execution was on and which cell computed how much; so live executions are spread evenly over the places of what is in
rollout (cells, and the standalone nodes all the time), and a step's training seconds over the cells by their time in training during
that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from cells.events import Schedule
from gyre_hpc.errors import GyreError
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.summary import Span, Summary, summarise
from gyre_hpc.simulation.facts import Given, Ran, gather
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.replay import replay


@dataclass(frozen=True)
class Measured:
    """One run; times in seconds. `simulated` is the simulator's wall time, `outcome` all else that it says."""

    run: Path
    began: float
    """Clock at the start of the first execution."""
    wall: float
    staleness: float
    """Mean over the steps, updates."""
    idle: float
    """Share of all node time."""
    idle_cells: tuple[float, ...]
    idle_pool: float | None
    """Of the standalone nodes, if there are any."""
    standalone: int
    """Their number."""
    executions: int
    execution_mean: float
    slowest: float
    """A group's slowest execution over the mean of all."""
    train_step: float
    """Training seconds of a step, all cells together."""
    transfers: int
    score: float
    simulated: float
    outcome: Outcome

    @property
    def error(self) -> float:
        return self.simulated / self.wall - 1


def measure(run: Path) -> Measured:
    """Read a run that is over. Raises GyreError for one that is not."""
    paths = RunPaths(run)
    events = list(read_events(paths.events))
    summary = summarise(events)
    facts = gather(run, Given())
    if summary.ended != "done" or facts.ran is None:
        raise GyreError(f"{run} is not a run of one attempt that is done ({summary.ended or 'it goes on'})", "see its logs")
    ends = [event for event in events if event["kind"] == "execution.end"]
    zero, began = summary.zero, facts.ran.began
    over = float(summary.steps[-1]["t"])
    live = [(float(e["t"]) - float(e["seconds"]) - zero, float(e["t"]) - zero) for e in ends]
    cells, pool = _busy(summary, live, zero, (began - zero, over - zero), facts.ran)
    nodes, standalone = facts.ran.nodes_per_cell * len(cells), facts.ran.standalone_nodes
    outcome = replay(facts, record=True)
    assert outcome is not None
    return Measured(
        run=run,
        began=began,
        wall=over - began,
        staleness=fmean(float(step["staleness_mean"]) for step in summary.steps),
        idle=1 - (facts.ran.nodes_per_cell * sum(cells) + standalone * pool) / (nodes + standalone),
        idle_cells=tuple(1 - busy for busy in cells),
        idle_pool=1 - pool if standalone else None,
        standalone=standalone,
        executions=len(ends),
        execution_mean=facts.workload.mean,
        slowest=fmean(map(max, facts.workload.groups)) / facts.workload.mean,
        train_step=fmean(float(step["train_seconds"]) for step in summary.steps),
        transfers=len(summary.transfers),
        score=fmean(float(step["score_mean"]) for step in summary.steps),
        simulated=outcome.steps[-1] - outcome.began,
        outcome=outcome,
    )


def _busy(
    summary: Summary, live: Sequence[tuple[float, float]], zero: float, window: tuple[float, float], ran: Ran
) -> tuple[tuple[float, ...], float]:
    """Share of the window in which each cell was busy, and in which the standalone nodes were."""
    seconds = [0.0] * summary.cells
    spans = [span for span in summary.spans if span.end > window[0] and span.start < window[1]]
    pool = _add_rollout(seconds, spans, live, window, ran.schedule)
    before = window[0]
    for step in summary.steps:
        end = float(step["t"]) - zero
        _add_training(seconds, spans, float(step["train_seconds"]) / ran.nodes_per_cell, (before, end))
        before = end
    length = window[1] - window[0]
    return tuple(busy / length for busy in seconds), pool / length


def _add_rollout(
    seconds: list[float], spans: Sequence[Span], live: Sequence[tuple[float, float]], window: tuple[float, float], schedule: Schedule
) -> float:
    """Adds what the cells were busy in rollout; what the standalone nodes were is returned."""
    serving = [span for span in spans if span.state == "rollout"]
    times = sorted({*window, *(t for pair in live for t in pair), *(t for s in serving for t in (s.start, s.end))})
    pool = 0.0
    for a, b in pairwise(t for t in times if window[0] <= t <= window[1]):
        middle = (a + b) / 2
        here = [span.cell for span in serving if span.start <= middle < span.end]
        places = sum(schedule.capacity[cell] for cell in here) + schedule.standalone_capacity
        count = sum(start <= middle < end for start, end in live)
        busy = (b - a) * min(1.0, count / places) if places else 0.0
        for cell in here:
            seconds[cell] += busy
        pool += busy
    return pool


def _add_training(seconds: list[float], spans: Sequence[Span], trained: float, window: tuple[float, float]) -> None:
    """`trained` cell-seconds between two steps' ends."""
    start, end = window
    shares = [0.0] * len(seconds)
    for span in spans:
        if span.state == "training":
            shares[span.cell] += max(0.0, min(span.end, end) - max(span.start, start))
    total = sum(shares)
    for cell, share in enumerate(shares):
        if share:
            seconds[cell] += min(share, trained * share / total)
