"""Where a rank of a cell stands, and how the ranks of a cell find each other for a world of their own."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cells.waiting import wait

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)
_ADDRESS = 320
"""Bytes for host:port; a host's name has 253 at most."""


@dataclass(frozen=True)
class Place:
    """One rank's."""

    cell: int
    slot: int
    ranks: int
    trains: bool = True
    """Whether this cell ever does: others hold no model of their own."""

    @property
    def is_leader(self) -> bool:
        return self.slot == 0

    @property
    def is_core(self) -> bool:
        return self.cell == 0


def own_host() -> str:
    """The name under which other nodes of the job reach this one."""
    return (os.environ.get("SLURMD_NODENAME") and socket.gethostname()) or "127.0.0.1"


def hold_address(held: socket.socket) -> str:
    """host:port for a cell's own torch.distributed world. `held` keeps the port from other processes (it does not listen, so that
    the world's own socket may be bound to it as well) until the world is there."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return f"{own_host()}:{held.getsockname()[1]}"


def share_address(comm: MPI.Intracomm, mine: str, deadline: float) -> str:
    """The leader's address, to all ranks of its cell. Raises DeadlineExceeded. Nobody leaves before all have it: torch's rendezvous, where
    the leader goes next, gives MPI no progress, and a message that still waits for its connection would wait for ever."""
    held = bytearray(mine.encode().ljust(_ADDRESS, b"\0"))
    wait(comm.Ibcast(held, 0).Test, "the address of the cell's own world", deadline, logger.warning)
    wait(comm.Ibarrier().Test, "the cell's ranks to have its world's address", deadline, logger.warning)
    return held.rstrip(b"\0").decode()
