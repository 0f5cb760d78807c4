"""Gradients and metrics of a step: one sum over the cells of the prefix, slot by slot, added up inside the core cell.

Ordering key: gradient, then metrics, then the core's own sum of both; every rank of the prefix calls in that order. No wait is without a
name and a deadline. Invariant: no rank of the core leaves before all of them have the sums: where they go next, torch's collectives give
MPI no progress, and a last small message that still waits for its connection would hold up both for ever.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cells.communicators import Communicators
from cells.reduce import start_sum, start_sum_for_all
from cells.waiting import wait

logger = logging.getLogger(__name__)


def into_core(
    ranks: Communicators,
    gradient: NDArray[np.float32],
    sums: NDArray[np.float64],
    prefix: int,
    deadline: float,
    sharded: bool = False,
) -> None:
    """Sums over the `prefix` cells into the core, in place; inside the core cell every rank ends with the sum over all slots.

    `gradient` is a rank's own, flat; `sharded`: that of its shard, summed over its cell already, so that a core's rank ends with its
    shard of the whole; `sums` its metrics; `deadline`: seconds of each wait. Raises DeadlineExceeded.
    """
    from mpi4py import MPI

    def done(request: Any, name: str) -> None:
        wait(request.Test, name, deadline, logger.warning)

    comm, root = ranks.prefix(prefix), ranks.cell_index == 0
    start_sum(comm, gradient).wait(f"the sum of gradients over {prefix} cells", deadline, logger.warning)
    done(comm.Ireduce(MPI.IN_PLACE if root else sums, sums if root else None, MPI.SUM, 0), f"the sum of metrics over {prefix} cells")
    if root and ranks.cell is not None and ranks.cell.Get_size() > 1:
        if not sharded:
            start_sum_for_all(ranks.cell, gradient).wait("the sum of gradients over the core cell", deadline, logger.warning)
        done(ranks.cell.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), "the sum of metrics over the core cell")
        done(ranks.cell.Ibarrier(), "the core's ranks to have the sums")
