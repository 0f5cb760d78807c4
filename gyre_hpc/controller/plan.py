"""From a finished group to micro-steps: advantages, selected paths, packing (qwengyre.md 3.4, 3.5).

Invariants: an execution's paths are the same in every process that selects with the same seed; a row is named in exactly one
micro-step; micro-step indices are dense and never used twice in one attempt. Executions whose advantage is 0 carry no gradient and
get no rows, but count in the step's number of executions (two-level mean).

The global shuffle (`schedule.shuffle`) is possible where a step's groups are all there before the first is trained on: rows of different
groups share micro-steps then, in an order drawn from (seed, step). The step's gradient is the same sum of the same rows either way.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyre_hpc.branches import Branches
from gyre_hpc.controller.messages import RowRef, Work
from trees.advantages import group_advantages
from trees.packing import pack
from trees.selection import select_paths
from trees.store import StoreReader

logger = logging.getLogger(__name__)


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
        self.branches = Branches()
        self.next_item = 0
        self._told = False

    def plan(self, outcomes: Sequence[Outcome]) -> GroupPlan:
        """Micro-steps of one complete group. Reads what the gateway has committed; IO errors reach the caller."""
        rows, lengths, plan = self._read(outcomes)
        return replace(plan, work=self._pack(rows, lengths))

    def together(self, groups: Sequence[Sequence[Outcome]], step: int) -> list[GroupPlan]:
        """The groups of step `step`, shuffled: the last one's plan has the micro-steps of all."""
        found = [self._read(outcomes) for outcomes in groups]
        rows = [(row, length) for mine, lengths, _ in found for row, length in zip(mine, lengths, strict=True)]
        chance = random.Random(f"shuffle {self._seed} {step}")
        chance.shuffle(rows)
        work = self._pack([row for row, _ in rows], [length for _, length in rows])
        items = list(work.items)  # packed longest first: what meets is drawn by that, who comes when is not
        chance.shuffle(items)
        plans = [plan for _, _, plan in found]
        return [*plans[:-1], replace(plans[-1], work=replace(work, items=tuple(items)))]

    def _read(self, outcomes: Sequence[Outcome]) -> tuple[list[RowRef], list[int], GroupPlan]:
        """(rows, their tokens, the plan without micro-steps) of one group."""
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
                rows.append(RowRef(outcome.execution, index, float(advantage), self.branches.of_execution(outcome.execution)))
                lengths.append(len(path.tokens))
        score = float(sum(outcome.score for outcome in valid))
        return rows, lengths, GroupPlan(Work(self.next_item, ()), len(valid), score, targets, skipped)

    def _pack(self, rows: Sequence[RowRef], lengths: Sequence[int]) -> Work:
        longest = max(lengths, default=0)
        if longest > self._budget and not self._told:
            self._told = True
            logger.info(
                "a row of %d tokens: those longer than training.tokens_per_microstep = %d are computed alone, each on one rank",
                longest,
                self._budget,
            )
        items = tuple(tuple(rows[i] for i in members) for members in pack(lengths, self._budget))
        work = Work(self.next_item, items)
        self.next_item += len(items)
        return work
