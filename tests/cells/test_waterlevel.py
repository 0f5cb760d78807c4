from __future__ import annotations

from cells.events import Schedule
from cells.roles import CellState, Roles
from cells.waterlevel import capacity_without, groups_that_fit, may_leave, rollout_capacity

R, L, T, B = CellState.ROLLOUT, CellState.LEAVING, CellState.TRAINING, CellState.RETURNING
SCHEDULE = Schedule(capacity=(10, 20, 30), groups_per_step=2, group_size=4, phi=0.5, mu=1, steps=3, standalone_capacity=5)


def test_capacity_counts_the_pool_and_cells_in_rollout_only() -> None:
    assert rollout_capacity(SCHEDULE, Roles.of((R, R, R))) == 65
    assert rollout_capacity(SCHEDULE, Roles.of((T, L, R))) == 35
    assert rollout_capacity(SCHEDULE, Roles.of((T, B, R))) == 35
    assert capacity_without(SCHEDULE, 1) == 55


def test_a_cell_leaves_when_the_rest_holds_every_unfinished_execution() -> None:
    assert may_leave(SCHEDULE, Roles.of((R, R, R)), 0, 55)
    assert not may_leave(SCHEDULE, Roles.of((R, R, R)), 0, 56)
    assert may_leave(SCHEDULE, Roles.of((T, R, R)), 1, 35)
    assert not may_leave(SCHEDULE, Roles.of((T, R, R)), 1, 36)


def test_groups_that_fit_beside_what_runs() -> None:
    assert groups_that_fit(SCHEDULE, Roles.of((T, T, R)), 30) == 1
    assert groups_that_fit(SCHEDULE, Roles.of((T, T, R)), 32) == 0
    assert groups_that_fit(SCHEDULE, Roles.of((T, T, T)), 9) == 0
