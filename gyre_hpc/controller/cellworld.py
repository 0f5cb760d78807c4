"""A training cell's own torch.distributed world, as its ranks enter, use and leave it.

Why it is watched: a collective of torch's can't be called off, and gives MPI no progress while it waits. Ordering key: announcements, in
the order in which all ranks of the cell hear them. Invariants: before a collective that no thread of ours serves MPI beside (cells/pump.py)
the ranks meet at a barrier, so that whatever they were told has reached all; each has a name and a deadline, after which the process that
waits ends itself, and with it the attempt (exit 75); what torch says of a rank that is gone is a consequence, never the cause.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cells.waiting import wait
from cells.watchdog import Watch
from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.place import Place, hold_address, share_address
from gyre_hpc.errors import PeerLost
from gyre_hpc.training.world import Seat, is_lost

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)


class CellWorld:
    """One rank's end of it. `comm`: the cell's ranks; `shards`: the model is sharded over them, so that they compute together."""

    def __init__(self, comm: MPI.Intracomm, place: Place, deadlines: DeadlinesSection, watch: Watch, shards: bool) -> None:
        self._comm, self._place, self._deadlines, self._watch = comm, place, deadlines, watch
        self._shards = shards

    @contextlib.contextmanager
    def entering(self) -> Iterator[Seat]:
        """Around what joins the world, by the seat that this rank has in it."""
        deadline = self._deadlines.start
        with socket.socket() as held:
            self._meet("the cell's ranks to start", deadline)
            master = share_address(self._comm, hold_address(held) if self._place.is_leader else "", deadline)
            with self.computing("the cell's ranks to load the model", deadline):
                yield Seat(self._place.slot, self._place.ranks, master)

    @contextlib.contextmanager
    def together(self, name: str, deadline: float) -> Iterator[None]:
        """Around what the ranks of a sharded cell do in their world, and nothing of MPI; with whole weights it is one rank's own."""
        if self._shards:
            self._meet(name, deadline)
        with self.computing(name, deadline):
            yield

    @contextlib.contextmanager
    def computing(self, name: str, deadline: float) -> Iterator[None]:
        """The same beside a thread that serves MPI."""
        if not self._shards:
            yield
            return
        with self._watch(name, deadline), _heard():
            yield

    def leave(self, close: Callable[[], None]) -> None:
        """All ranks are here, and `close`."""
        deadline = self._deadlines.step
        # on NCCL the end is collective: it can't be taken back, and only waited for inside
        self._meet("the cell's ranks to leave their world", deadline)
        with self._watch("the cell's own world to end", deadline):
            close()

    def _meet(self, name: str, deadline: float) -> None:
        wait(self._comm.Ibarrier().Test, name, deadline, logger.warning)


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Who is gone is told by others, and better."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        first = str(error).strip().splitlines()[0][:200]
        raise PeerLost(f"another rank of the cell is gone: {first}", "see mpi.log and the other ranks; the same command resumes") from error
