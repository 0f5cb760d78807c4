"""Groups from their task to their end: given to the gateway, and let go when nothing needs them any more.

Invariants: a group is told to the policy when the gateway has it; its generated task stays on disk until it was trained on, skipped or
dropped.
"""

from __future__ import annotations

import logging

from cells.events import Dispatch, GroupDispatched
from gyre_hpc.controller.groups import Groups
from gyre_hpc.events import EventLog
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.tasks.source import TaskSource

logger = logging.getLogger(__name__)


class Dispatching:
    """Of groups of `size` executions."""

    def __init__(self, groups: Groups, tasks: TaskSource, client: ControlClient, events: EventLog, size: int) -> None:
        self._groups, self._tasks, self._client, self._events, self._size = groups, tasks, client, events, size

    def dispatch(self, decision: Dispatch, burst: int) -> list[GroupDispatched]:
        """New groups, begun under the version that the decision names."""
        numbers, new = [], []
        for _ in range(decision.groups):
            group = self._groups.next_group
            task = str(self._tasks.task(group).path)
            self._groups.dispatched(group, task, self._size, decision.version)
            numbers.append(group)
            new.append({"group": group, "task": task, "size": self._size, "version": decision.version, "burst": burst})
        self._client.dispatch(new)
        return [GroupDispatched(group, decision.version, self._size) for group in numbers]

    def release(self, group: int) -> None:
        """What a group that is over no longer needs on disk: its generated task."""
        self._tasks.release(self._groups[group].task)
        self._groups.forget(group)

    def drop(self, group: int, step: int) -> None:
        """A complete group that no step may take any more, `step` being done."""
        state = self._groups[group]
        logger.warning("group %d is not trained on: it is older than schedule.staleness_bound allows", group)
        self._events.emit("group.dropped", group=group, version=state.version, counts_as=state.counts_as, step=step)
        self.release(group)
