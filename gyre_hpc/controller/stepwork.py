"""How much of the open step's work the training cells have claimed: what the policy hears with `schedule.join_late`.

Invariants: a group is claimed when all its micro-steps are, in the order in which they were fed (cells/claims.py hands them out in that
order); the policy is told each number of groups once. The counter is in this process's own memory, so that looking costs nothing.
"""

from __future__ import annotations

from typing import Protocol

from cells.events import Claimed


class Counter(Protocol):
    """What is needed of `cells.claims.Claims`."""

    def claimed(self) -> int:
        """Micro-steps of this step that are taken."""
        ...

    def next_step(self, items: int) -> None:
        """The step had `items` micro-steps and is closed."""
        ...


class StepWork:
    """The fed groups of the open step and their micro-steps."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._ends: list[int] = []
        """Micro-steps up to and with each group."""
        self._told = 0
        self._seen = -1

    def fed(self, items: int) -> None:
        """A group with `items` micro-steps (none, if no execution of it has an advantage)."""
        self._ends.append((self._ends[-1] if self._ends else 0) + items)

    def look(self, step: int) -> tuple[Claimed | None, bool]:
        """(what to tell of the open step `step`, whether any micro-step was claimed since the last look)."""
        if self._told == len(self._ends):
            return None, False
        claimed = self._counter.claimed()
        moved, self._seen = claimed != self._seen, claimed
        groups = self._told
        while groups < len(self._ends) and self._ends[groups] <= claimed:
            groups += 1
        if groups == self._told:
            return None, moved
        self._told = groups
        return Claimed(step, groups), True

    def closed(self) -> None:
        """The step is over, all cells have acknowledged its close."""
        self._counter.next_step(self._ends[-1] if self._ends else 0)
        self._ends = []
        self._told, self._seen = 0, -1
