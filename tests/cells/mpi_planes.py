"""On 1 + K x R + S ranks: communicators, claims by all leaders at once, sums over prefixes, a snapshot beside them.

Run by test_communicators.py. Arguments: ranks per cell, standalone cells.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from mpi4py import MPI  # noqa: E402

from cells import reduce  # noqa: E402
from cells.claims import Claims  # noqa: E402
from cells.communicators import Communicators, Layout, WorldMismatch, build  # noqa: E402
from cells.waiting import DeadlineExceeded  # noqa: E402
from cells.watchdog import Watchdog  # noqa: E402

STEPS = (40, 0, 1, 25)
ELEMENTS = 1000


def check_communicators(comms: Communicators, layout: Layout) -> None:
    world = comms.world
    assert (comms.cell_index is None) == (world.rank == 0)
    assert (comms.control is not None) == (world.rank == 0 or comms.is_leader)
    if world.rank == 0:
        assert comms.control is not None
        assert (comms.control.rank, comms.control.size) == (0, layout.all_cells + 1)
        return
    assert comms.cell is not None
    assert comms.cell_index is not None
    width = 1 if layout.is_standalone(comms.cell_index) else layout.ranks_per_cell
    assert (comms.cell.size, comms.cell.rank) == (width, comms.slot)
    for k in range(1, layout.cells + 1):
        if comms.cell_index < k:
            assert (comms.prefix(k).size, comms.prefix(k).rank) == (k, comms.cell_index)
        else:
            with pytest.raises(ValueError, match="not in a prefix"):
                comms.prefix(k)


def check_claims(control: MPI.Intracomm) -> None:
    """All leaders claim while the items are announced bit by bit: each item is claimed once, none beyond what is announced."""
    watchdog = Watchdog(lambda name, seconds: os._exit(9), print)
    claims = Claims(control, watchdog.watch, patience=20.0)
    for items in STEPS:
        mine = []
        upto = 0
        while upto <= items and control.rank > 0:
            item = claims.claim(upto)
            if item is None:
                upto += 7 if upto + 7 <= items else max(1, items - upto)
                continue
            assert item < upto
            mine.append(item)
            if control.rank == 1:
                time.sleep(0.0005)  # a slow cell takes fewer
        everything = control.gather(mine)
        if control.rank == 0:
            assert everything is not None
            assert sorted(item for items_of_one in everything for item in items_of_one) == list(range(items))
        assert claims.claimed() == items
        control.Barrier()
        if control.rank % 2 == 0:
            claims.next_step(items)
            assert claims.claim(0) is None
        else:  # late: with the old base there is nothing to be had
            assert claims.claim(items) is None
            claims.reset(claims.base + items)
    assert claims.value() == sum(STEPS)
    control.Barrier()
    claims.free()


def check_late_claims(control: MPI.Intracomm) -> None:
    """A rank that does not come to make the counter is not waited for for ever."""
    own = control.Dup()
    if control.rank == control.size - 1:
        control.Barrier()  # the others have given up
        own.Ibarrier().Wait()
    else:
        with pytest.raises(DeadlineExceeded, match="all ranks to make the counter of claims"):
            Claims(own, lambda name, seconds: nullcontext(), deadline=0.2)
        control.Barrier()
    control.Barrier()
    own.Free()


def check_sums(comms: Communicators, layout: Layout) -> None:
    """Sums over every prefix, while the core also sends its weights to the last cell."""
    assert comms.cell_index is not None
    everyone = comms.prefix(layout.cells)
    weights = np.arange(ELEMENTS, dtype=np.float32) * (comms.cell_index == 0)
    snapshot = None
    if layout.cells > 1 and comms.cell_index == 0:
        snapshot = reduce.start_send(everyone, weights, layout.cells - 1, tag=7)
    elif comms.cell_index == layout.cells - 1 and layout.cells > 1:
        snapshot = reduce.start_receive(everyone, weights, 0, tag=7)
    for k in range(1, layout.cells + 1):
        if comms.cell_index < k:
            gradient = np.full(ELEMENTS, 10.0**comms.cell_index, np.float32)
            reduce.start_sum(comms.prefix(k), gradient).wait("sum", 20, print)
            if comms.cell_index == 0:
                assert (gradient == sum(10.0**cell for cell in range(k))).all()
    if snapshot is not None:
        snapshot.wait("snapshot", 20, print)
        assert (weights == np.arange(ELEMENTS)).all()
    copy = np.full(ELEMENTS, comms.cell_index + 5, np.float32)
    reduce.start_broadcast(everyone, copy).wait("broadcast", 20, print)
    assert (copy == 5).all()


def check_deadline(comms: Communicators, layout: Layout) -> None:
    """A sum that the others are late for ends by its deadline, and is whole once they have come."""
    everyone = comms.prefix(layout.cells)
    gradient = np.ones(ELEMENTS, np.float32)
    if comms.cell_index == 0:
        pending = reduce.start_sum(everyone, gradient)
        if layout.cells > 1:
            with pytest.raises(DeadlineExceeded, match=r"the late sum: not there after 0\.1 s"):
                pending.wait("the late sum", 0.1, lambda line: None)
        for cell in range(1, layout.cells):
            everyone.send("now", cell, tag=9)
        pending.wait("sum", 20, print)
        assert (gradient == layout.cells).all()
    else:
        assert everyone.recv(source=0, tag=9) == "now"
        reduce.start_sum(everyone, gradient).wait("sum", 20, print)


def main() -> None:
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    ranks_per_cell, standalone = int(sys.argv[1]), int(sys.argv[2])
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    layout = Layout((size - 1 - standalone) // ranks_per_cell, ranks_per_cell, standalone)
    reduce.PIECE = 64  # many pieces
    with pytest.raises(WorldMismatch, match="needs"):
        build(Layout(layout.cells + 1, ranks_per_cell, standalone))
    comms = build(layout)
    check_communicators(comms, layout)
    if comms.control is not None:
        check_claims(comms.control)
        check_late_claims(comms.control)
    if comms.cell_index is not None and not layout.is_standalone(comms.cell_index):
        check_sums(comms, layout)
        check_deadline(comms, layout)
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    print(f"passed {rank} of {size}", flush=True)


if __name__ == "__main__":
    main()
