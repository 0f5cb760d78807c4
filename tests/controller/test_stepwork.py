from __future__ import annotations

from cells.events import Claimed
from gyre_hpc.controller.stepwork import StepWork


class MemoryCounter:
    """A counter without MPI."""

    def __init__(self) -> None:
        self.value = self.base = 0

    def claimed(self) -> int:
        return self.value - self.base

    def next_step(self, items: int) -> None:
        self.base += items


def test_a_group_is_claimed_with_its_last_microstep_and_told_once() -> None:
    counter = MemoryCounter()
    work = StepWork(counter)
    assert work.look(1) == (None, False)
    work.fed(2)
    work.fed(0)
    work.fed(3)
    assert work.look(1) == (None, True)
    assert work.look(1) == (None, False)
    counter.value = 1
    assert work.look(1) == (None, True)
    counter.value = 2
    assert work.look(1) == (Claimed(1, 2), True)  # the second group has no work: it counts with the first
    counter.value = 4
    assert work.look(1) == (None, True)
    counter.value = 5
    assert work.look(1) == (Claimed(1, 3), True)
    assert work.look(1) == (None, False)


def test_the_next_step_counts_from_its_own_beginning() -> None:
    counter = MemoryCounter()
    work = StepWork(counter)
    work.fed(2)
    counter.value = 2
    assert work.look(1)[0] == Claimed(1, 1)
    work.closed()
    work.fed(0)
    assert work.look(2) == (Claimed(2, 1), True)
    work.fed(1)
    assert work.look(2) == (None, False)
    counter.value = 3
    assert work.look(2) == (Claimed(2, 2), True)
    work.closed()
    assert counter.base == 3
