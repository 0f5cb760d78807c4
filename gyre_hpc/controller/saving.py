"""A step's checkpoint, written by all ranks of the core cell together (gyre_hpc/checkpoint.py has its form).

Invariants: every rank writes its own shard, the leader all else and the marker, last; a rank that can't write still takes part, or the
others would wait for it; what is not whole is abandoned, and every rank raises the same GyreError. Ranks meet at a barrier that has a
deadline before they speak, so that none waits for ever for one that is stuck in its file system; it grows with the bytes, and the leader
says by how much, for whoever waits for the core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cells.waiting import wait
from gyre_hpc.checkpoint import CoreState, Part, RunState, core_name
from gyre_hpc.checkpoint_writer import abandon, begin, commit, write_core, write_state
from gyre_hpc.controller.restoring import Progress
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths

if TYPE_CHECKING:
    from mpi4py import MPI

    from gyre_hpc.training.actor import Core

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """`deadline`: seconds for ranks to come; `slowest`: MB/s at which each writes its shard at the least, on top of that. `tell` hears, on
    the leader, how many seconds that makes."""

    deadline: float
    slowest: float = 50.0
    tell: Callable[[float], None] = lambda seconds: None

    def writing(self, largest: int) -> float:
        """Seconds for a shard of so many bytes."""
        return largest / (self.slowest * 1e6)


def save(comm: MPI.Intracomm, paths: RunPaths, keep: int, core: Core, state: RunState, limits: Limits) -> dict[str, Any]:
    """Collective over the core cell; its leader is rank 0. Returns {seconds, bytes} there, {} elsewhere.

    Raises GyreError, and DeadlineExceeded for ranks that do not come in time.
    """
    leads = comm.Get_rank() == 0
    began = time.monotonic()
    partial: Path | GyreError = Path()
    if leads:
        partial = _or_error(lambda: begin(paths, state.step))
    held = _or_error(core.state)
    wait(comm.Ibarrier().Test, "the core's ranks to begin the checkpoint", limits.deadline, logger.warning)
    partial = comm.bcast(partial, root=0)
    if isinstance(partial, GyreError):
        raise partial
    folder = partial
    extra = limits.writing(max(comm.allgather(0 if isinstance(held, GyreError) else held.bytes)))
    if leads:
        limits.tell(extra)
    part = held if isinstance(held, GyreError) else _or_error(_writer(folder, held, state.step))
    wait(comm.Ibarrier().Test, "the core's ranks to write their shards", limits.deadline + extra, logger.warning)
    parts = comm.allgather(part)
    errors = [part for part in parts if isinstance(part, GyreError)]
    if errors:
        if leads:
            abandon(folder)
        raise errors[0]
    if not leads or isinstance(held, GyreError):
        return {}
    try:
        saved = commit(folder, [*parts, write_state(folder, state, held.identity)], keep)
    except GyreError:
        abandon(folder)
        raise
    return {"seconds": round(time.monotonic() - began, 4), "bytes": saved.bytes}


def _writer(folder: Path, held: CoreState, step: int) -> Callable[[], Part]:
    """This rank's shard goes into `folder`; the log says how far it is."""

    def write() -> Part:
        progress = Progress(f"step {step}, {core_name(held.rank)}", held.bytes, what="written so far")
        part = write_core(folder, held, progress.tell)
        progress.end()
        return part

    return write


def _or_error(action: Callable[[], T]) -> T | GyreError:
    """What `action` returns, or the GyreError that it raised."""
    try:
        return action()
    except GyreError as error:
        return error
