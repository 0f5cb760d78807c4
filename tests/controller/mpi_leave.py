"""A rank that comes and goes as those of a run do: argument FOLDER, where it marks what it has reached."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from gyre_hpc.controller.main import _finalize_mpi, _init_mpi, _leave
from gyre_hpc.driver.world import settings

if __name__ == "__main__":
    rank = int(os.environ["PMI_RANK"])
    os.environ.update(settings())  # over UCX a rank that goes without a word is not missed
    world = _init_mpi(Path(sys.argv[1]), rank)
    world.Barrier()
    time.sleep(random.Random(rank).random() / 5)  # nobody leaves at the same moment
    _finalize_mpi()
    print(f"rank {rank} leaves", flush=True)
    _leave(0)
