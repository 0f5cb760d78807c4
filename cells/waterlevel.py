"""The waterlevel rule: when the next cell may leave rollout (qwengyre.md 2.3).

w = dispatched - finished executions, the queue included. C_R counts every slot that is in rollout now: the standalone pool, and the
cell that wants to leave. A cell may leave when what remains, C_R - C_e, holds every unfinished execution. The rule can't block for
ever: C_R - C_e >= 0, and w reaches 0 because every execution ends (its overall timeout sees to that).
"""

from __future__ import annotations

from cells.events import Schedule
from cells.roles import Roles


def rollout_capacity(schedule: Schedule, roles: Roles) -> int:
    """C_R: slots in rollout now. A cell in transit has none: it admits nothing any more, or not yet."""
    return schedule.capacity_from[roles.serving]


def may_leave(schedule: Schedule, roles: Roles, cell: int, waterlevel: int) -> bool:
    """Whether the capacity that remains without `cell` covers every unfinished execution."""
    return waterlevel <= rollout_capacity(schedule, roles) - schedule.capacity[cell]


def capacity_without(schedule: Schedule, cells: int) -> int:
    """C_R once every cell but the first `cells` is back in rollout."""
    return schedule.capacity_from[cells]


def groups_that_fit(schedule: Schedule, roles: Roles, waterlevel: int) -> int:
    """How many more groups rollout can hold now without its waterlevel passing its capacity."""
    return max(0, rollout_capacity(schedule, roles) - waterlevel) // schedule.group_size
