"""A step's checkpoint, written by all ranks of the core cell together (gyre_hpc/checkpoint.py has its form).

Invariants: every rank writes its own shard, the leader all else and the marker, last; a rank that can't write still takes part, or the
others would wait for it; what is not whole is abandoned, and every rank raises the same GyreError.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gyre_hpc.checkpoint import RunState, abandon, begin, commit, write_core, write_state
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths

if TYPE_CHECKING:
    from mpi4py import MPI

    from gyre_hpc.training.actor import Core

T = TypeVar("T")


def save(comm: MPI.Intracomm, paths: RunPaths, keep: int, core: Core, state: RunState) -> dict[str, Any]:
    """Collective over the core cell; its leader is rank 0. Returns {seconds, bytes} there, {} elsewhere. Raises GyreError."""
    leads = comm.Get_rank() == 0
    began = time.monotonic()
    partial: Path | GyreError = Path()
    if leads:
        partial = _or_error(lambda: begin(paths, state.step))
    partial = comm.bcast(partial, root=0)
    if isinstance(partial, GyreError):
        raise partial
    folder = partial
    parts = comm.allgather(_or_error(lambda: write_core(folder, core.state())))
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
