"""From a finished group to micro-steps: advantages, selected paths, packing (qwengyre.md 3.4, 3.5).

Invariants: an execution's paths are the same in every process that selects with the same seed; a row is named in exactly one
micro-step; micro-step indices are dense and never used twice in one attempt. Executions whose advantage is 0 carry no gradient and
get no rows, but count in the step's number of executions (two-level mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_hpc.controller.messages import RowRef, Work
from trees.advantages import group_advantages
from trees.packing import pack
from trees.selection import select_paths
from trees.store import StoreReader


@dataclass(frozen=True)
class Outcome:
    """One finished execution of a group, as the ledger tells it."""

    execution: int
    score: float
    valid: bool


@dataclass(frozen=True)
class GroupPlan:
    """What one group adds to a step. `score_sum` over the `executions` valid ones; `targets` selected target tokens."""

    work: Work
    executions: int
    score_sum: float
    targets: int
    skipped: int
    """Valid executions without a row: incomplete trees or no target at all."""


class Planner:
    """Turns groups into numbered micro-steps."""

    def __init__(self, reader: StoreReader, jmax: int, seed: int, tokens_per_microstep: int) -> None:
        self._reader = reader
        self._jmax = jmax
        self._seed = seed
        self._budget = tokens_per_microstep
        self.next_item = 0

    def plan(self, outcomes: Sequence[Outcome]) -> GroupPlan:
        """Micro-steps of one complete group. Reads what the gateway has committed; IO errors reach the caller."""
        self._reader.refresh()
        advantages = group_advantages([outcome.score for outcome in outcomes], [outcome.valid for outcome in outcomes])
        valid = [outcome for outcome in outcomes if outcome.valid]
        rows: list[RowRef] = []
        lengths: list[int] = []
        targets = skipped = 0
        for outcome, advantage in zip(outcomes, advantages, strict=True):
            if not outcome.valid:
                continue
            paths = select_paths(self._reader.tree(outcome.execution), self._jmax, self._seed)
            if not paths:
                skipped += 1
            targets += sum(int(path.targets.sum()) for path in paths)
            if advantage == 0.0:
                continue
            for index, path in enumerate(paths):
                rows.append(RowRef(outcome.execution, index, float(advantage)))
                lengths.append(len(path.tokens))
        items = tuple(tuple(rows[i] for i in members) for members in pack(lengths, self._budget))
        work = Work(first=self.next_item, items=items)
        self.next_item += len(items)
        return GroupPlan(work, len(valid), float(sum(outcome.score for outcome in valid)), targets, skipped)
