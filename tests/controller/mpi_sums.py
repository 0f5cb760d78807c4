"""On 1 + 2 x R ranks: a step's sums reach every rank of the core (of shards: those of its slot), and no other cell's are changed.

Run by test_sums.py; argument: R.
"""

from __future__ import annotations

import sys
import time

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from cells import reduce  # noqa: E402
from cells.communicators import Communicators, Layout, build  # noqa: E402
from cells.waiting import wait  # noqa: E402
from gyre_hpc.controller.sums import GivenUp, into_core  # noqa: E402

ELEMENTS = 1000
TOLD = 9


def main() -> None:
    width = int(sys.argv[1])
    reduce.PIECE = 300  # several of them
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    ranks = build(Layout(2, width), MPI.COMM_WORLD)
    if ranks.cell_index is not None:
        assert ranks.slot is not None
        for prefix, sharded in ((1, False), (2, False), (1, True), (2, True)):
            if ranks.cell_index >= prefix:
                continue
            own = float(ranks.world.rank)
            gradient, sums = np.full(ELEMENTS, own, np.float32), np.arange(3, dtype=np.float64) * own
            into_core(ranks, gradient, sums, prefix, 20.0, sharded)
            whole = float(sum(range(1, 1 + prefix * width)))
            if ranks.cell_index == 0:
                of_slot = float(sum(1 + cell * width + ranks.slot for cell in range(prefix)))
                assert gradient.tolist() == [of_slot if sharded else whole] * ELEMENTS
                assert sums.tolist() == [0.0, whole, 2 * whole]
            else:
                assert sums.tolist() == [0.0, own, 2 * own]
        if ranks.cell_index == 0 and width > 1:
            given_up(ranks)
    print(f"passed {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}", flush=True)
    MPI.Finalize()


def given_up(ranks: Communicators) -> None:
    """The leader leaves before it has its sum, when others of its cell wait for it already: they hear of it, and all go on together."""
    assert ranks.cell is not None

    def look() -> None:
        if ranks.is_leader or (ranks.cell is not None and ranks.cell.Iprobe(0, TOLD)):
            raise GivenUp

    gradient, sums = np.ones(ELEMENTS, np.float32), np.ones(3)
    try:
        into_core(ranks, gradient, sums, 1, 20.0, sharded=ranks.cell.size > 2, look=look)
    except GivenUp:
        if ranks.is_leader:
            time.sleep(0.5)
            for slot in range(1, ranks.cell.size):
                ranks.cell.send(None, slot, TOLD)
    else:
        raise AssertionError("it has a sum to which one has added nothing")
    together = np.ones(1)
    wait(ranks.cell.Iallreduce(MPI.IN_PLACE, together, MPI.SUM).Test, "all of them", 10.0, print)
    assert together.tolist() == [ranks.cell.size]
    wait(ranks.cell.Ibarrier().Test, "all of them", 10.0, print)
    assert ranks.cell.allgather(ranks.slot) == list(range(ranks.cell.size))
    assert ranks.cell.bcast(ranks.slot, 0) == 0


if __name__ == "__main__":
    main()
