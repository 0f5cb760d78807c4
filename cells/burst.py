"""Groups between their dispatch and the step that consumes them, and how many a burst's boundary asks for.

Invariants: a group is known once (`dispatched` of a known or consumed id changes nothing) and consumed once; the order in which
complete groups are taken is (version, id). Ordering key: the group's id, handed out in dispatch order.

Staleness of a group is d = (version that is being updated) - (version at its dispatch). With a bound, a group of version v must be
in a step s <= v + 1 + bound. Two rules keep it: the boundary never asks for more groups than the bound leaves steps for, and a
younger group may take a slot only if the older ones still fit in theirs (`holds_back`). A resume that gave up steps may find more than
fits: what is past its step is dropped (`overdue`), and holds nothing back.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    """Outstanding groups: dispatched, and neither fed to a step nor skipped.

    Counts are kept as groups change, so that an event costs the same in a backlog of ten groups and of a million executions.
    """

    def __init__(self, consumed: Consumed | None = None) -> None:
        self.consumed = consumed if consumed is not None else Consumed()
        self.waterlevel = 0
        """w = d - f over the outstanding groups; the fed ones are complete and add nothing."""
        self._groups: dict[int, GroupState] = {}
        self._ready: list[tuple[int, int]] = []
        """A heap of (version, group): complete and valid; taken ones leave it when they come up."""
        self._ready_count = 0
        self._void: list[int] = []
        self._versions: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupState]:
        return iter(self._groups.values())

    def known(self, group: int) -> bool:
        return group in self._groups or group in self.consumed

    def dispatched(self, group: int, version: int, size: int) -> bool:
        """A new group; False when it was known already."""
        if self.known(group):
            return False
        self._put(GroupState(group, version, size))
        return True

    def restore(self, frontier: Iterable[GroupFrontier]) -> None:
        """Groups as the ledger has them after a restart."""
        for f in frontier:
            if f.trained:
                self.consumed.add(f.group)
            elif not self.known(f.group):
                finished = f.size if f.valid is not None else f.finished
                self._put(GroupState(f.group, f.version, f.size, finished, f.valid))

    def finished(self, group: int) -> None:
        """One execution of `group` is over; nothing for groups that are consumed or complete. KeyError for an unknown group."""
        if group in self.consumed:
            return
        old = self._groups[group]
        if not old.complete:
            self._put(GroupState(group, old.version, old.size, min(old.size, old.finished + 1)))

    def complete(self, group: int, valid: int) -> None:
        """All executions of `group` are over. KeyError for an unknown group."""
        if group in self.consumed:
            return
        old = self._groups[group]
        self._put(GroupState(group, old.version, old.size, old.size, valid))

    def take(self, group: int) -> GroupState:
        """Remove a group that is fed or skipped now."""
        state = self._groups.pop(group)
        self.waterlevel -= state.unfinished
        self._versions[state.version] -= 1
        if not self._versions[state.version]:
            del self._versions[state.version]
        self._ready_count -= bool(state.valid)
        return state

    @property
    def ready_count(self) -> int:
        """Complete groups that can be trained on."""
        return self._ready_count

    def oldest(self) -> GroupState | None:
        """The first of `ready`."""
        while self._ready:
            state = self._groups.get(self._ready[0][1])
            if state is not None and state.valid:
                return state
            heapq.heappop(self._ready)
        return None

    def ready(self) -> list[GroupState]:
        """Complete groups that can be trained on, oldest version first, then by id."""
        return sorted((g for g in self if g.valid), key=lambda g: (g.version, g.group))

    def void(self) -> list[GroupState]:
        """Complete groups with nothing to train on."""
        self._void = [group for group in self._void if group in self._groups]
        return [self._groups[group] for group in self._void]

    def older_than(self, version: int) -> list[tuple[int, int]]:
        """(version, groups) of the outstanding groups of older versions, oldest first."""
        return sorted((v, n) for v, n in self._versions.items() if v < version)

    def overdue(self, oldest: int) -> list[GroupState]:
        """Complete groups with something to train on, of versions before `oldest`."""
        if not any(version < oldest for version in self._versions):
            return []
        return sorted((g for g in self if g.valid and g.version < oldest), key=lambda g: (g.version, g.group))

    def _put(self, state: GroupState) -> None:
        """A new group, or a new state of one."""
        old = self._groups.get(state.group)
        self._groups[state.group] = state
        self.waterlevel += state.unfinished - (old.unfinished if old is not None else 0)
        if old is None:
            self._versions[state.version] += 1
        if state.valid and not (old is not None and old.valid):
            heapq.heappush(self._ready, (state.version, state.group))
            self._ready_count += 1
        elif state.valid == 0:
            self._void.append(state.group)


def holds_back(backlog: Backlog, candidate: GroupState, schedule: Schedule, step: int, fed: int) -> bool:
    """Whether `candidate` must wait because older groups need the slots that are left before their staleness bound.

    `step` is the number of steps done, `fed` the groups in the open step. Earliest deadline first: for each deadline D the groups
    due by D must fit in what remains of the open step and the steps up to D once the candidate has its slot.
    """
    if schedule.staleness_bound is None:
        return False
    per_step, bound = schedule.groups_per_step, schedule.staleness_bound
    left_now = per_step - fed - 1
    count = 0
    for version, groups in backlog.older_than(candidate.version):
        if version + bound < step:  # too late for any step
            continue
        count += groups
        steps_after_this = max(0, version + bound - step)
        if count > left_now + steps_after_this * per_step:
            return True
    return False
