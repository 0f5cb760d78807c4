"""Groups between their dispatch and the step that consumes them, and how many a burst's boundary asks for.

Invariants: a group is known once (`dispatched` of a known or consumed id changes nothing) and consumed once; the order in which
complete groups are taken is (version, id). Ordering key: the group's id, handed out in dispatch order.

Staleness of a group is d = (version that is being updated) - (version at its dispatch). With a bound, a group of version v must be
in a step s <= v + 1 + bound. Two rules keep it: the boundary never asks for more groups than the bound leaves steps for, and a
younger group may take a slot only if the older ones still fit in theirs (`holds_back`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cells.events import GroupFrontier, Schedule


def boundary_target(schedule: Schedule, step: int) -> int:
    """Q_b after `step` steps: outstanding groups to top up to; never more than the steps that are left can consume."""
    groups = math.ceil((schedule.phi + schedule.mu) * schedule.groups_per_step - 1e-9)
    if schedule.staleness_bound is not None:
        groups = min(groups, (schedule.staleness_bound + 1) * schedule.groups_per_step)
    return min(groups, (schedule.steps - step) * schedule.groups_per_step)


@dataclass(frozen=True)
class GroupState:
    """An outstanding group. `valid` None: some of its executions are not over."""

    group: int
    version: int
    size: int
    finished: int = 0
    valid: int | None = None

    @property
    def unfinished(self) -> int:
        """Executions that rollout must still hold; at least one until the group is declared complete: only then is it known whether
        it must be replaced, and a cell that left in between could not take the replacement."""
        return 0 if self.complete else max(1, self.size - self.finished)

    @property
    def complete(self) -> bool:
        return self.valid is not None


class Consumed:
    """A set of group ids that stays small when ids are dense: everything below `below`, and some above."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self._above = set(above)
        self._settle()

    def __contains__(self, group: int) -> bool:
        return group < self.below or group in self._above

    def add(self, group: int) -> None:
        if group >= self.below:
            self._above.add(group)
            self._settle()

    def with_groups(self, groups: Iterable[int]) -> Consumed:
        return Consumed(self.below, self._above | set(groups))

    @property
    def above(self) -> list[int]:
        return sorted(self._above)

    def _settle(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1


class Backlog:
    """Outstanding groups: dispatched, and neither fed to a step nor skipped."""

    def __init__(self, consumed: Consumed | None = None) -> None:
        self.consumed = consumed if consumed is not None else Consumed()
        self._groups: dict[int, GroupState] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupState]:
        return iter(self._groups.values())

    @property
    def waterlevel(self) -> int:
        """w = d - f over the outstanding groups; the fed ones are complete and add nothing."""
        return sum(g.unfinished for g in self._groups.values())

    def known(self, group: int) -> bool:
        return group in self._groups or group in self.consumed

    def dispatched(self, group: int, version: int, size: int) -> bool:
        """A new group; False when it was known already."""
        if self.known(group):
            return False
        self._groups[group] = GroupState(group, version, size)
        return True

    def restore(self, frontier: Iterable[GroupFrontier]) -> None:
        """Groups as the ledger has them after a restart."""
        for f in frontier:
            if f.trained:
                self.consumed.add(f.group)
            elif not self.known(f.group):
                finished = f.size if f.valid is not None else f.finished
                self._groups[f.group] = GroupState(f.group, f.version, f.size, finished, f.valid)

    def finished(self, group: int) -> None:
        """One execution of `group` is over; nothing for groups that are consumed or complete. KeyError for an unknown group."""
        if group in self.consumed:
            return
        state = self._groups[group]
        self._groups[group] = replace(state, finished=min(state.size, state.finished + 1))

    def complete(self, group: int, valid: int) -> None:
        """All executions of `group` are over. KeyError for an unknown group."""
        if group in self.consumed:
            return
        state = self._groups[group]
        self._groups[group] = replace(state, finished=state.size, valid=valid)

    def take(self, group: int) -> GroupState:
        """Remove a group that is fed or skipped now."""
        return self._groups.pop(group)

    def ready(self) -> list[GroupState]:
        """Complete groups that can be trained on, oldest version first, then by id."""
        return sorted((g for g in self if g.valid), key=lambda g: (g.version, g.group))

    def void(self) -> list[GroupState]:
        """Complete groups with nothing to train on."""
        return [g for g in self if g.valid == 0]


def holds_back(backlog: Backlog, candidate: GroupState, schedule: Schedule, step: int, fed: int) -> bool:
    """Whether `candidate` must wait because older groups need the slots that are left before their staleness bound.

    `step` is the number of steps done, `fed` the groups in the open step. Earliest deadline first: for each deadline D the groups
    due by D must fit in what remains of the open step and the steps up to D once the candidate has its slot.
    """
    if schedule.staleness_bound is None:
        return False
    per_step, bound = schedule.groups_per_step, schedule.staleness_bound
    older = sorted(g.version for g in backlog if g.version < candidate.version)
    left_now = per_step - fed - 1
    for count, version in enumerate(older, start=1):
        steps_after_this = max(0, version + bound - step)
        if count > left_now + steps_after_this * per_step:
            return True
    return False
