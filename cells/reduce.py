"""Large float32 buffers between cells over MPI: the sum of gradients to the core, and a snapshot of weights to a joining satellite.

Invariants: nothing blocks inside MPI (pieces of PIECE elements, each polled with Test), so signals are served and every wait can end by
its deadline; buffers are contiguous float32 and stay untouched by the caller until done. The sum is unnormalised: who computed how
much does not matter, the division happens once at the optimizer step. Its order of additions is MPI's, so results for different
prefixes agree to rounding only.

Deadlock rule: every rank of a communicator starts its collectives in the same order. Point-to-point transfers may overlap anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cells.waiting import wait

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE = 1 << 24
"""Elements (64 MiB) of one MPI call: far below int32 counts, large enough for bandwidth."""

F32 = NDArray[np.float32]


class Pending:
    """MPI requests with the buffers that they use; `test` polls them all."""

    def __init__(self, requests: list[Any], buffers: tuple[F32, ...]) -> None:
        self._requests = requests
        self._buffers = buffers

    def test(self) -> bool:
        """Whether all is done; lets MPI progress. Call it now and then in a long computation."""
        self._requests = [r for r in self._requests if not r.Test()]
        return not self._requests

    def wait(self, name: str, deadline: float, log: Callable[[str], None]) -> None:
        """Poll with back-off. DeadlineExceeded after `deadline` seconds; the buffers are then still in use."""
        wait(self.test, name, deadline, log)


def start_sum(comm: MPI.Intracomm, buffer: F32, root: int = 0) -> Pending:
    """Begin to add up every rank's `buffer` float32[n] into the root's, in place. Collective; with one rank there is nothing to do."""
    from mpi4py import MPI

    if comm.Get_size() == 1:
        return Pending([], (buffer,))
    is_root = comm.Get_rank() == root
    requests = []
    for piece in _pieces(buffer):
        send, receive = (MPI.IN_PLACE, piece) if is_root else (piece, None)
        requests.append(comm.Ireduce(send, receive, MPI.SUM, root))
    return Pending(requests, (buffer,))


def start_sum_for_all(comm: MPI.Intracomm, buffer: F32) -> Pending:
    """Begin to add up every rank's `buffer` float32[n], in place on every rank. Collective."""
    from mpi4py import MPI

    return Pending([comm.Iallreduce(MPI.IN_PLACE, piece, MPI.SUM) for piece in _pieces(buffer)], (buffer,))


def start_broadcast(comm: MPI.Intracomm, buffer: F32, root: int = 0) -> Pending:
    """Begin to copy the root's `buffer` float32[n] into everybody's. Collective."""
    return Pending([comm.Ibcast(piece, root) for piece in _pieces(buffer)], (buffer,))


def start_send(comm: MPI.Intracomm, buffer: F32, to: int, tag: int = 0) -> Pending:
    """Begin to send to one rank, which calls `start_receive` with the same length and tag. The core goes on working, and polls."""
    return Pending([comm.Isend(piece, to, tag) for piece in _pieces(buffer)], (buffer,))


def start_receive(comm: MPI.Intracomm, buffer: F32, source: int, tag: int = 0) -> Pending:
    """Begin to receive into `buffer`."""
    return Pending([comm.Irecv(piece, source, tag) for piece in _pieces(buffer)], (buffer,))


def _pieces(buffer: F32) -> list[F32]:
    if buffer.dtype != np.float32 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"need a contiguous float32[n], got {buffer.dtype}{list(buffer.shape)}")
    return [buffer[at : at + PIECE] for at in range(0, buffer.size, PIECE)]
