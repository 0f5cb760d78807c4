"""A step's checkpoint, written by all ranks of the core cell together (gyre_hpc/checkpoint.py has its form).

Invariants: every rank writes its own shard, the leader all else and the marker, last; a rank that can't write still takes part, or the
others would wait for it; what is not whole is abandoned, and every rank raises the same GyreError. Ranks meet at a barrier that has a
deadline before they speak, so that none waits for ever for one that is stuck in its file system.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cells.waiting import wait
from gyre_hpc.checkpoint import RunState
from gyre_hpc.checkpoint_writer import abandon, begin, commit, write_core, write_state
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths

if TYPE_CHECKING:
    from mpi4py import MPI

    from gyre_hpc.training.actor import Core

logger = logging.getLogger(__name__)
T = TypeVar("T")


def save(comm: MPI.Intracomm, paths: RunPaths, keep: int, core: Core, state: RunState, deadline: float) -> dict[str, Any]:
    """Collective over the core cell; its leader is rank 0. Returns {seconds, bytes} there, {} elsewhere.

    Raises GyreError, and DeadlineExceeded for ranks that do not come within `deadline` seconds.
    """
    leads = comm.Get_rank() == 0
    began = time.monotonic()
    partial: Path | GyreError = Path()
    if leads:
        partial = _or_error(lambda: begin(paths, state.step))
    wait(comm.Ibarrier().Test, "the core's ranks to begin the checkpoint", deadline, logger.warning)
    partial = comm.bcast(partial, root=0)
    if isinstance(partial, GyreError):
        raise partial
    folder = partial
    part = _or_error(lambda: write_core(folder, core.state()))
    wait(comm.Ibarrier().Test, "the core's ranks to write their shards", deadline, logger.warning)
    parts = comm.allgather(part)
    errors = [part for part in parts if isinstance(part, GyreError)]
    if errors:
        if leads:
            abandon(folder)
        raise errors[0]
    if not leads:
        return {}
    try:
        saved = commit(folder, [*parts, write_state(folder, state)], keep)
    except GyreError:
        abandon(folder)
        raise
    return {"seconds": round(time.monotonic() - began, 4), "bytes": saved.bytes}


def _or_error(action: Callable[[], T]) -> T | GyreError:
    """What `action` returns, or the GyreError that it raised."""
    try:
        return action()
    except GyreError as error:
        return error
