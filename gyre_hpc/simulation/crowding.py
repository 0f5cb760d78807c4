"""What executions of a recorded run would have taken on engines with room: their durations without the waiting for one another.

Where supervisors run more executions than all engines in rollout hold, all of them go on in turns, each at the share (slots /
executions) of its speed, as the model behind `slots` has it: work = the time that it ran, each second weighed by that share. A simulation
that queues what has no slot would count the same waiting again. Only such runs are looked at: where places are short just while cells
return, calls hardly wait (by experiment: weighed as well, five schedules of docs/real-runs.md are predicted to 8 % rms instead of 5 %).

Invariants: work is never more than the duration, and the same where there was room for all. Ordering key: the clock of the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_hpc.report.summary import Span
from gyre_hpc.simulation.workload import Recorded


@dataclass(frozen=True)
class Ended:
    """One execution that ended at clock `at` after `seconds`."""

    group: int
    at: float
    seconds: float


def slots_over_time(spans: Iterable[Span], zero: float, held: Sequence[int], standalone: int) -> list[tuple[float, int]]:
    """(clock, by how much the slots in rollout change then), the first entry what the standalone pool holds from ever."""
    found = [(float("-inf"), standalone)]
    for span in spans:
        if span.state == "rollout" and span.cell < len(held):
            found += [(zero + span.start, held[span.cell]), (zero + span.end, -held[span.cell])]
    return found


def without_waiting(workload: Recorded, ended: Sequence[Ended], slots: Sequence[tuple[float, int]]) -> Recorded:
    """`workload` (made of the same executions, in the same order) with the work of each in place of its duration.

    A stretch without any slot, in which all of them stood, is no work either; an execution that ran in nothing else keeps its duration.
    """
    changes = [(end.at - end.seconds, 1, 0) for end in ended] + [(end.at, -1, 0) for end in ended]
    changes += [(at, 0, change) for at, change in slots]
    changes.sort()
    at = np.array([change[0] for change in changes])
    running, serving = (np.cumsum([change[i] for change in changes]) for i in (1, 2))
    share = np.minimum(1.0, serving / np.maximum(1, running))
    first = int(np.searchsorted(at, -np.inf, side="right"))  # the pool's entry has no time
    done = np.concatenate(([0.0], np.cumsum(np.diff(at[first:]) * share[first:-1])))

    def work(end: Ended) -> float:
        start, stop = np.interp((end.at - end.seconds, end.at), at[first:], done)
        return min(end.seconds, float(stop - start)) or end.seconds

    groups: dict[int, list[float]] = {}
    for end in ended:
        groups.setdefault(end.group, []).append(work(end))
    return replace(workload, groups=tuple(tuple(groups[group]) for group in sorted(groups)))
