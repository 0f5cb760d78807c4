from __future__ import annotations

import pytest

from cells.events import Role, Transfer, TransferDone, TransferFailed
from cells.moves import TRANSFER_ATTEMPTS, Moves
from cells.schedule import ScheduleStuck

ROLLOUT, TRAINING = Role.ROLLOUT, Role.TRAINING


def trained(cells: int, prefix: int) -> Moves:
    moves = Moves(cells)
    for cell in range(prefix):
        moves.begin(cell, TRAINING)
        moves.done(TransferDone(cell, TRAINING))
    return moves


def test_a_cell_in_transit_is_away_and_moving() -> None:
    moves = Moves(2)
    assert (moves.moving, moves.away) == (False, False)
    assert moves.begin(0, TRAINING) == [Transfer(0, TRAINING)]
    assert (moves.moving, moves.away) == (True, True)
    with pytest.raises(ValueError, match="in transit"):
        moves.begin(1, TRAINING)
    moves.done(TransferDone(0, TRAINING))
    assert (moves.moving, moves.away, moves.roles.prefix) == (False, True, 1)


def test_the_returns_go_down_to_the_cells_that_stay() -> None:
    moves = trained(3, 3)
    moves.boundary(1)
    for cell in (2, 1):
        assert moves.returning
        moves.begin(cell, ROLLOUT)
        moves.settle()
        assert moves.returning
        moves.done(TransferDone(cell, ROLLOUT))
        moves.settle()
    assert not moves.returning
    assert moves.roles.prefix == 1
    moves.boundary(1)
    assert not moves.returning


def test_a_satellite_is_refused_for_one_burst_and_the_core_never() -> None:
    moves = trained(3, 1)
    moves.begin(1, TRAINING)
    moves.failed(TransferFailed(1, TRAINING))
    assert moves.refused(1)
    assert moves.roles.prefix == 1
    moves.begin_burst()
    assert not moves.refused(1)
    core = Moves(2)
    for _ in range(TRANSFER_ATTEMPTS - 1):
        core.begin(0, TRAINING)
        core.failed(TransferFailed(0, TRAINING))
        assert not core.refused(0)
    core.begin(0, TRAINING)
    with pytest.raises(ScheduleStuck, match="cell 0 to training failed 3 times in a row"):
        core.failed(TransferFailed(0, TRAINING))


def test_failures_count_in_a_row_only() -> None:
    moves = trained(2, 2)
    for _ in range(2 * TRANSFER_ATTEMPTS):
        moves.begin(1, ROLLOUT)
        moves.failed(TransferFailed(1, ROLLOUT))
        moves.begin(1, ROLLOUT)
        moves.done(TransferDone(1, ROLLOUT))
        moves.begin(1, TRAINING)
        moves.done(TransferDone(1, TRAINING))
