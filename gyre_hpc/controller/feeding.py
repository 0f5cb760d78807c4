"""Complete groups on their way into the open step: planned, announced to the cells as micro-steps, and counted as the cells claim them.

Ordering key: the policy's feeds. Invariants: micro-steps are announced in the order of their numbers, which begin anew with each step; a
step's plans are given out once, when it closes.
"""

from __future__ import annotations

from collections.abc import Sequence

from cells.epochs import Channel
from cells.events import Claimed
from gyre_hpc.controller.groups import Groups
from gyre_hpc.controller.messages import encode
from gyre_hpc.controller.plan import GroupPlan, Planner
from gyre_hpc.controller.stepwork import StepWork


class Feeding:
    """The groups of the open step. `shuffled`: those that are fed together share their micro-steps (schedule.shuffle)."""

    def __init__(self, planner: Planner, work: StepWork, channel: Channel, shuffled: bool) -> None:
        self.planner = planner
        self._work, self._channel, self._shuffled = work, channel, shuffled
        self._plans: list[tuple[int, GroupPlan]] = []

    def feed(self, numbers: Sequence[int], groups: Groups, step: int) -> None:
        """These groups become micro-steps of step `step`, and the cells hear of them. Raises what reading their record raises."""
        ended = [[groups[number].outcomes[index] for index in sorted(groups[number].outcomes)] for number in numbers]
        plans = self.planner.together(ended, step) if self._shuffled else map(self.planner.plan, ended)
        for number, plan in zip(numbers, plans, strict=True):
            self._plans.append((number, plan))
            self._work.fed(len(plan.work.items))
            if plan.work.items:
                self._channel.announce(encode(plan.work), agree=False)

    def look(self, step: int) -> tuple[Claimed | None, bool]:
        """(what to tell of the open step, whether anything was claimed since the last look)."""
        return self._work.look(step)

    def close(self) -> tuple[list[tuple[int, GroupPlan]], int]:
        """Nothing more comes into the step: (each of its groups with its plan, its micro-steps)."""
        plans, items = self._plans, self.planner.next_item
        self._plans, self.planner.next_item = [], 0
        return plans, items

    def closed(self) -> None:
        """All cells have acknowledged the step's close."""
        self._work.closed()
