"""Inside the allocation: one run of benchmarks/policies.py, with emulated device time.

Why: two cores can't train in six cells at once, and cells that wait for a core would say nothing about a schedule. So a trained row
takes `row_seconds` of its cell: its real gradient is computed, then the rank sleeps for what is left, as if a device of the cell's own
worked. Everything else is the live system as it is: the driver, the gateway, supervisors, engines, MPI ranks, one srun step each. The
emulation is put around `Satellite.accumulate` in the rank's process; no configuration of a user's run reaches it.

    python -m benchmarks.policies_job run CONFIG ROW_SECONDS      (the batch job)
    python -m benchmarks.policies_job rank ROW_SECONDS            (an MPI rank)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_hpc.configfile import load
from gyre_hpc.controller import main as controller
from gyre_hpc.driver.driver import drive
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.processes import python

if TYPE_CHECKING:
    from gyre_hpc.training.loss import Sums
    from gyre_hpc.training.rows import TrainRow

MODULE = "benchmarks.policies_job"


def emulate_device(row_seconds: float) -> None:
    """From now on a row that this process trains takes `row_seconds`, its real gradient included."""
    from gyre_hpc.training.actor import Satellite

    real = Satellite.accumulate

    def accumulate(self: Satellite, rows: Sequence[TrainRow]) -> Sums:
        until = time.monotonic() + row_seconds * len(rows)
        sums = real(self, rows)
        time.sleep(max(0.0, until - time.monotonic()))
        return sums

    Satellite.accumulate = accumulate  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the run, or of the rank."""
    what, *rest = arguments
    if what == "rank":
        emulate_device(float(rest[0]))
        return controller.main()
    config, row_seconds = rest
    paths = prepare(load(Path(config)))
    return int(drive(paths.root, programs=Programs(mpi=lambda: python(MODULE, "rank", row_seconds))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
