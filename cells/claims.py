"""Work is claimed from one atomic counter: a faster or earlier cell simply takes more (qwengyre.md 2.5).

The counter lives in an RMA window of the root (allocated by MPI: targets of `Win.Create` were seen to stall) and only ever grows, over
the whole life of the run. A step's items are numbered from 0; item i is claimed when the counter goes from base + i to base + i + 1, where
base is the number of items of all earlier steps.

Invariants: an item is claimed once; the counter never passes base + upto, the items that are known to exist (compare-and-swap), so at a
step's end it is exactly base + items and the next base needs no message and no reset of memory: a rank that is late claims with its
old base, finds the counter beyond it and gets None. A flush blocks inside MPI until the root has answered: each has its deadline by the
watchdog (cells/watchdog.py), for MPI itself offers no other way out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cells.waiting import wait
from cells.watchdog import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)


class Claims:
    """Made and freed collectively by all ranks of `comm`; all other calls are one rank's own business.

    The ranks meet before MPI makes the window, which can only be waited for inside MPI, before the first claim and before it is freed.
    Raises DeadlineExceeded where some do not come within `deadline` seconds the first two times, `patience` the last; `log` hears of it at
    half time. `watch` bounds what blocks inside MPI: `patience` seconds for one look at the counter, as long as a step may take.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        watch: Watch,
        root: int = 0,
        deadline: float = 60.0,
        patience: float = 600.0,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        from mpi4py import MPI

        wait(comm.Ibarrier().Test, "all ranks to make the counter of claims", deadline, log)
        self._mpi = MPI
        self._comm, self._root = comm, root
        self._watch, self._patience, self._log = watch, patience, log
        item = MPI.INT64_T.Get_size()
        with watch("MPI to make the counter of claims", deadline):
            self._window = MPI.Win.Allocate(item if comm.Get_rank() == root else 0, item, MPI.INFO_NULL, comm)
            self._window.Lock_all()
        self.base = 0
        if comm.Get_rank() == root:
            self._swap_to_zero()
        wait(comm.Ibarrier().Test, "the counter of claims to be 0", deadline, log)

    def reset(self, base: int) -> None:
        """From now on claim items of the step whose items are numbered from `base` (the sum of all earlier steps' items)."""
        if base < self.base:
            raise ValueError(f"the base can't go back from {self.base} to {base}")
        self.base = base

    def next_step(self, items: int) -> None:
        """`reset` to the step after one that had `items` items."""
        self.reset(self.base + items)

    def claim(self, upto: int) -> int | None:
        """Claim the next of the step's items 0..upto-1; None when all of them are taken (more may be announced later)."""
        limit = self.base + upto
        at = self.value()
        while self.base <= at < limit:
            seen = self._compare_and_swap(at, at + 1)
            if seen == at:
                return at - self.base
            at = seen
        return None

    def value(self) -> int:
        """The counter now: items claimed in the run's life."""
        result = np.zeros(1, np.int64)
        self._window.Fetch_and_op(np.zeros(1, np.int64), result, self._root, 0, self._mpi.NO_OP)
        self._flush()
        return int(result[0])

    def claimed(self) -> int:
        """Items of this step that are taken."""
        return self.value() - self.base

    def free(self) -> None:
        """Collective."""
        wait(self._comm.Ibarrier().Test, "all ranks to give the counter of claims back", self._patience, self._log)
        with self._watch("MPI to free the counter of claims", self._patience):
            self._window.Unlock_all()
            self._window.Free()

    def _flush(self) -> None:
        with self._watch("the root to answer about the counter of claims", self._patience):
            self._window.Flush(self._root)

    def _compare_and_swap(self, expected: int, new: int) -> int:
        result = np.zeros(1, np.int64)
        self._window.Compare_and_swap(np.array([new], np.int64), np.array([expected], np.int64), result, self._root, 0)
        self._flush()
        return int(result[0])

    def _swap_to_zero(self) -> None:
        result = np.zeros(1, np.int64)
        self._window.Fetch_and_op(np.zeros(1, np.int64), result, self._root, 0, self._mpi.REPLACE)
        self._flush()
