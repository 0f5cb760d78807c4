"""The torch.distributed world of one training cell: its ranks and nobody else's; between cells there is MPI alone.

Ordering key: whatever is collective here runs in the order in which the cell's announcements come (controller/cell.py), the same on every
rank. Invariants: MPI is neither used nor initialised; the world's own deadline only stands behind those of its callers, which name what
they wait for (cells/watchdog.py) and end the process: a collective can't be called off.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from gyre_hpc.config import DeadlinesSection
from gyre_hpc.errors import Resumable

_distributed: Any = torch.distributed
_LOOPBACK = "127.0.0.1"
_BEHIND = 30.0
"""Seconds by which a world's own deadline stands behind its callers'."""


def patience(deadlines: DeadlinesSection) -> float:
    """Seconds of each collective of a cell that shares its model: more than any caller waits, for a start, a step or a publication."""
    return max(deadlines.start, deadlines.step, deadlines.transfer) + _BEHIND


@dataclass(frozen=True)
class Seat:
    """A rank's place in its cell's world; `master` "host:port" is where rank 0 listens."""

    rank: int
    ranks: int
    master: str


def join(seat: Seat, backend: str, deadline: float) -> None:
    """Form the world, of which every collective has `deadline` seconds. Collective. Raises Resumable."""
    try:
        limit = timedelta(seconds=deadline)
        torch.distributed.init_process_group(backend, store=_store(seat, limit), rank=seat.rank, world_size=seat.ranks, timeout=limit)
    except (OSError, RuntimeError, ValueError) as error:
        raise Resumable(
            f"rank {seat.rank} of {seat.ranks} of a cell could not join {seat.master}: {str(error).splitlines()[0]}",
            "see the other ranks' logs; raise deadlines.start if they are slow; the same command resumes",
        ) from error


def _store(seat: Seat, limit: timedelta) -> Any:
    """Where its ranks find each other. It asks for no secret: on one node it listens on loopback alone, where torch itself would listen on
    every network; between nodes the network must be the job's own (a node's name may mean loopback to the node itself)."""
    host, port = seat.master.rsplit(":", 1)
    local: dict[str, Any] = {}
    if seat.rank == 0 and host == _LOOPBACK:
        local["master_listen_fd"] = socket.create_server((host, int(port))).detach()
    return _distributed.TCPStore(host, int(port), seat.ranks, is_master=seat.rank == 0, timeout=limit, **local)


def leave() -> None:
    """The end of the world. Collective on NCCL, local on gloo."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_lost(error: RuntimeError) -> bool:
    """Whether that is what a collective says of a rank that is gone or silent; gloo has no class of its own for it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
