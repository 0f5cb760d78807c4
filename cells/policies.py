"""The schedules as peers: elastic, colocate, async, each with and without streaming, driven by the same events.

What each says beside what all have in common (cells/policy.py):

- elastic: one cell after the other leaves rollout, each as soon as what remains holds every unfinished execution (the waterlevel); over
  a boundary the core stays if the next batch is complete and the others hold what is dispatched;
- colocate: all training cells leave, one after the other, once what never trains holds every unfinished execution (with no standalone
  part: when all is over); none stays;
- async: the training cells leave before the first dispatch, and stay for ever.

Invariants: `elastic` and `colocate` never begin a transfer to training that would leave an unfinished execution without a slot. `async`
transfers while nothing is dispatched; after a restart executions that do not fit wait in the queue, as they always do there.

Choices where the design is silent: the elastic core leaves only once a complete group waits for it: before that it would idle, and
without this it would return at a boundary and leave again at once when capacity is plentiful. Colocate leaves on the same signal, so
without streaming it trains nothing before the burst is complete; a burst's stragglers go on in the standalone part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cells.events import Decision, Mode, Role, Schedule
from cells.policy import Policy
from cells.waterlevel import capacity_without, may_leave


class ElasticPolicy(Policy):
    """Cells change their role one by one, as the waterlevel allows (qwengyre.md 2.3)."""

    def _may_leave(self, cell: int) -> bool:
        return may_leave(self.schedule, self.roles, cell, self.waterlevel)

    def _staying(self) -> int:
        """The rule for the core alone; satellites always go back."""
        batch_waits = self._backlog.ready_count >= self.schedule.groups_per_step
        if not self.schedule.streaming:
            batch_waits = self._begins()
        return int(self.roles.core_trains and batch_waits and self.waterlevel <= capacity_without(self.schedule, 1))


class ColocatePolicy(Policy):
    """All training cells change their role together; `trainers` below the number of cells gives it standalone nodes."""

    keeps_spare = False
    """No cell leaves before its executions fit into the standalone part."""

    def _may_leave(self, cell: int) -> bool:
        return self.waterlevel <= capacity_without(self.schedule, self.schedule.training_cells)

    def _staying(self) -> int:
        return 0


class AsyncPolicy(Policy):
    """Two fixed pools: the first `trainers` cells train, the others roll out. A satellite whose transfer fails rolls out as well."""

    keeps_satellites = True

    def __init__(self, schedule: Schedule, snapshot: Mapping[str, Any] | None = None) -> None:
        super().__init__(schedule, snapshot)
        self._settled = False

    def _dispatch(self, groups: int) -> list[Decision]:
        """Nothing before the pools are what they stay: a transfer under unfinished executions would only move them about."""
        return super()._dispatch(groups) if self._settled else []

    def _advance(self) -> list[Decision]:
        if self._settled or self._moves.moving:
            return super()._advance()
        cell = self.roles.prefix
        if cell < self.schedule.training_cells and not self._moves.refused(cell):
            return self._moves.begin(cell, Role.TRAINING)
        self._settled = True
        return self._top_up() + super()._advance()

    def _begins(self) -> bool:
        return self._settled and super()._begins()

    def _may_leave(self, cell: int) -> bool:
        return False

    def _staying(self) -> int:
        return self.roles.prefix

    def _room(self) -> int:
        """What has no slot yet waits in the queue."""
        return self.schedule.steps * self.schedule.groups_per_step


_MODES: Mapping[Mode, type[Policy]] = {Mode.ELASTIC: ElasticPolicy, Mode.COLOCATE: ColocatePolicy, Mode.ASYNC: AsyncPolicy}


def make_policy(schedule: Schedule, snapshot: Mapping[str, Any] | None = None) -> Policy:
    """The policy that `schedule.mode` names. ValueError for a schedule that can't work."""
    return _MODES[schedule.mode](schedule, snapshot)
