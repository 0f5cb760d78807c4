"""On a controller and a core of 2 ranks: all agree on one checkpoint, whichever shard is damaged.

Arguments: FOLDER:STEP, of a run and which step is right (0: none). Run by test_restoring.py.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mpi4py import MPI

from cells.communicators import Layout, build
from gyre_hpc.configfile import check
from gyre_hpc.controller.restoring import agree
from gyre_hpc.paths import RunPaths

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    config = check({"cells": {"count": 1, "ranks_per_node": 2}}, "test")
    ranks = build(Layout(1, 2))
    for case in sys.argv[1:]:
        folder, step = case.rsplit(":", 1)
        found = agree(ranks, config, RunPaths(Path(folder)), Path(folder) / "model")
        assert (found.step if found is not None else 0) == int(step), (case, found)
    MPI.COMM_WORLD.Barrier()
    print(f"passed {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}", flush=True)
