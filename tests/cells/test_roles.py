from __future__ import annotations

import pytest

from cells.events import Role
from cells.roles import CellState, Roles, predecessors

R, L, T, B = CellState.ROLLOUT, CellState.LEAVING, CellState.TRAINING, CellState.RETURNING


def test_every_state_is_reached_only_from_its_predecessors() -> None:
    for old in CellState:
        for new in CellState:
            states = Roles.of((old,))
            if old in predecessors(new):
                assert states.moved(0, new).states == (new,)
            else:
                with pytest.raises(ValueError, match="can't go from"):
                    states.moved(0, new)


@pytest.mark.parametrize(
    ("states", "cell", "to"),
    [((R, R, R), 1, L), ((L, R, R), 1, L), ((T, R, R), 2, L), ((T, T, R), 0, B), ((T, T, L), 1, B), ((T, B, R), 0, B), ((T, B, R), 2, L)],
)
def test_transfers_are_serial_and_training_is_a_prefix(states: tuple[CellState, ...], cell: int, to: CellState) -> None:
    with pytest.raises(ValueError, match=f"cell {cell} can't"):
        Roles.of(states).moved(cell, to)


def test_a_whole_round_with_a_transfer_undone_each_way() -> None:
    roles = Roles.all_rollout(2)
    roles = roles.begin(0, Role.TRAINING).end(0, Role.TRAINING, undone=True)
    assert roles.states == (R, R)
    roles = roles.begin(0, Role.TRAINING).end(0, Role.TRAINING)
    roles = roles.begin(1, Role.TRAINING)
    assert (roles.prefix, roles.moving, roles.next_to_leave) == (1, 1, None)
    roles = roles.end(1, Role.TRAINING)
    assert (roles.prefix, roles.next_to_leave) == (2, None)
    roles = roles.begin(1, Role.ROLLOUT).end(1, Role.ROLLOUT, undone=True)
    assert roles.states == (T, T)
    with pytest.raises(ValueError, match="no transfer to training is under way"):
        roles.end(1, Role.TRAINING)
