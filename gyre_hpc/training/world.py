"""The torch.distributed world of one training cell: its ranks and nobody else's; between cells there is MPI alone.

Ordering key: whatever is collective here runs in the order in which the cell's announcements come (controller/cell.py), the same on every
rank. Invariants: MPI is neither used nor initialised; the world's own deadline only stands behind those of its callers, which name what
they wait for (cells/watchdog.py) and end the process: a collective can't be called off.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from gyre_hpc.errors import Resumable

BEHIND = 30.0
"""Seconds by which a world's own deadline stands behind its callers'."""


@dataclass(frozen=True)
class Seat:
    """A rank's place in its cell's world; `master` "host:port" is where rank 0 listens."""

    rank: int
    ranks: int
    master: str


def join(seat: Seat, backend: str, deadline: float) -> None:
    """Form the world, of which every collective has `deadline` seconds. Collective. Raises Resumable."""
    try:
        torch.distributed.init_process_group(
            backend, init_method=f"tcp://{seat.master}", rank=seat.rank, world_size=seat.ranks, timeout=timedelta(seconds=deadline)
        )
    except (RuntimeError, ValueError) as error:
        raise Resumable(
            f"rank {seat.rank} of {seat.ranks} of a cell could not join {seat.master}: {str(error).splitlines()[0]}",
            "see the other ranks' logs; raise deadlines.start if they are slow; the same command resumes",
        ) from error


def leave() -> None:
    """The end of the world. Collective on NCCL, local on gloo."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_lost(error: RuntimeError) -> bool:
    """Whether that is what a collective says of a rank that is gone or silent; gloo has no class of its own for it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
