"""On 1 + 2 x R ranks: a step's sums reach every rank of the core (of shards: those of its slot), and no other cell's are changed.

Run by test_sums.py; argument: R.
"""

from __future__ import annotations

import sys

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from cells import reduce  # noqa: E402
from cells.communicators import Layout, build  # noqa: E402
from gyre_hpc.controller.sums import into_core  # noqa: E402

ELEMENTS = 1000


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
    print(f"passed {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}", flush=True)
    MPI.Finalize()


if __name__ == "__main__":
    main()
