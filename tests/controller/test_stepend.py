from __future__ import annotations

from gyre_hpc.controller.stepend import closing


def test_a_close_is_told_without_the_waiting_for_the_last_cell() -> None:
    core = {"reduce_seconds": 0.9, "close_seconds": 1.5}  # 0.8 of it until the last one came; then sum, optimizer, checkpoint
    last = {"reduce_seconds": 0.1, "close_seconds": 0.15}
    assert closing([core, {"reduce_seconds": 0.5, "close_seconds": 0.55}, last]) == 0.7
    assert closing([core]) == 1.5
    # satellites that wait for the stepped weights: the last one to come sees it all
    assert closing([core, {"reduce_seconds": 0.1, "close_seconds": 0.75}]) == 0.75
