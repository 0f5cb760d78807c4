"""Gradients and metrics of a step: one sum over the cells of the prefix, slot by slot, added up inside the core cell.

Ordering key: gradient, then metrics, then the core's own sum of both; every rank of the prefix calls in that order. No wait is without a
name and a deadline. Invariant: no rank of the core leaves before all of them have the sums: where they go next, torch's collectives give
MPI no progress, and a last small message that still waits for its connection would hold up both for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cells.communicators import Communicators
from cells.reduce import Pending, start_sum, start_sum_for_all
from cells.waiting import wait

logger = logging.getLogger(__name__)
_left: list[Any] = []
"""What MPI may still write into: requests and buffers of sums that were left."""


def _nothing() -> None:
    """Nobody is looked for."""


class GivenUp(Exception):
    """The step is not closed: somebody waits for this rank to stop."""


def into_core(
    ranks: Communicators,
    gradient: NDArray[np.float32],
    sums: NDArray[np.float64],
    prefix: int,
    deadline: float,
    sharded: bool = False,
    look: Callable[[], None] = _nothing,
) -> None:
    """Sums over the `prefix` cells into the core, in place; inside the core cell every rank ends with the sum over all slots.

    `gradient` is a rank's own, flat; `sharded`: that of its shard, summed over its cell already, so that a core's rank ends with its
    shard of the whole; `sums` its metrics; `deadline`: seconds of each wait. Raises DeadlineExceeded, and what `look` raises, which is
    called while it waits for others; no more once the core's other ranks may have gone on with the sums. The leader may leave by it, and
    the others when they hear of that: nothing then goes over `ranks.sums` any more.
    """
    from mpi4py import MPI

    held: list[Any] = [gradient, sums]

    def over(begun: Any, test: Callable[[], bool], name: str) -> None:
        def looked() -> bool:
            look()
            return test()

        held.append(begun)
        wait(looked, name, deadline, logger.warning)

    def summed(pending: Pending, name: str) -> None:
        over(pending, pending.test, name)

    def done(request: Any, name: str) -> None:
        over(request, request.Test, name)

    comm, root = ranks.prefix(prefix), ranks.cell_index == 0
    try:
        summed(start_sum(comm, gradient), f"the sum of gradients over {prefix} cells")
        done(comm.Ireduce(MPI.IN_PLACE if root else sums, sums if root else None, MPI.SUM, 0), f"the sum of metrics over {prefix} cells")
        if root and ranks.sums is not None and ranks.sums.Get_size() > 1:
            if not sharded:
                summed(start_sum_for_all(ranks.sums, gradient), "the sum of gradients over the core cell")
            done(ranks.sums.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), "the sum of metrics over the core cell")
            met = ranks.sums.Ibarrier()
            if ranks.is_leader:  # who comes here goes on with the sums, and the others after it
                look = _nothing
            done(met, "the core's ranks to have the sums")
    except BaseException:
        _left.append(held)
        raise
