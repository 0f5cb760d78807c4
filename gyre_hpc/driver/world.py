"""Whether the MPI world came up: ranks leave a mark when they are ready for MPI_Init and another one when they are through.

Invariants:
- a start that fails is no verdict on the run: until every rank has come through nothing was done that a second start would do twice, so
  the step is started again, `TRIES` times in all; a rank that wrote down why it ends (a failure file) is believed at once, and so is a
  death before all were ready;
- no rank waits in MPI_Init for ever. Before the last rank is ready a clock runs for each that is not, from the moment when all
  processes are there; the first may have to try tasks in boxes before, and says so, and how long each may take. Then one runs for MPI_Init.
  A rank that is late is not started again: what it is stuck in (a file system, mostly) is there the next time as well.

Why it fails at all: MPICH (5.0) hands each rank's whole UCX address buffer, several kilobytes with whatever lay in memory behind it,
through PMI in pieces, and Slurm's pmi2 plugin reads at most 1,024 bytes of a request: a piece that compresses badly is cut, and the world
then hangs in MPI_Init or aborts ("value not properly terminated in client request"), on some machines in one start of four. With libfabric
(`DEFAULTS`) an address is some ten bytes. Roles, claims, epochs and the gradients' sums between cells go over MPI (those inside a
cell over NCCL or gloo): whoever has a fabric that one library knows better says so, with MPIR_CVAR_CH4_NETMOD=ucx or FI_PROVIDER in the
environment (`CHOSEN` variables go through); a start that fails is then made again, as any other.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

TRIES = 3
DEFAULTS = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
CHOSEN = ("MPIR_CVAR_", "MPICH_", "OMPI_MCA_")
"""Prefixes of an MPI library's own settings, which a person may have set for the MPI step; other children never see them."""
_READY, _THROUGH, _BUSY = "ready-mpi", "world-mpi", "busy-mpi"
log = logging.getLogger("gyre.driver")


def settings(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the MPI step has in its environment on top of everybody's: our defaults, and what was chosen outside."""
    env = os.environ if env is None else env
    return {**DEFAULTS, **{name: value for name, value in env.items() if name.startswith(CHOSEN)}}


def mark_busy(folder: Path, rank: int, what: str, seconds: float) -> None:
    """A rank: before MPI_Init it does something that may take so long."""
    partial = folder / f".{_BUSY}.{rank}"
    partial.write_text(json.dumps({"what": what, "seconds": seconds}))
    os.replace(partial, folder / f"{_BUSY}.{rank}")


def mark_ready(folder: Path, rank: int) -> None:
    """A rank: nothing is left to do before MPI_Init."""
    (folder / f"{_READY}.{rank}").touch()


def mark_through(folder: Path, rank: int) -> None:
    """A rank: MPI_Init has returned."""
    (folder / f"{_THROUGH}.{rank}").touch()


class WorldWatch:
    """The driver's side: `ranks` of them, at most `limit` seconds to be ready, and for MPI_Init. `now`: a monotonic clock, seconds."""

    def __init__(self, folder: Path, ranks: int, limit: float) -> None:
        self.folder, self.ranks, self.limit = folder, ranks, limit
        self.tries = 1
        self._begin()
        self._up = False

    def _begin(self) -> None:
        self._there_at: float | None = None
        self._ready_at: float | None = None
        self._busy: dict[int, tuple[str, float]] = {}
        """What each rank said last of what it does, and when."""
        self._told: set[str] = set()

    def up(self) -> bool:
        """Whether every rank is through."""
        self._up = self._up or self._count(_THROUGH) >= self.ranks
        return self._up

    def hangs(self, now: float) -> bool:
        """Whether all ranks have been ready for longer than the limit and not all are through."""
        if not self.starting():
            return False
        self._ready_at = now if self._ready_at is None else self._ready_at
        self._tell("all ranks to come through MPI_Init", now - self._ready_at, self.limit)
        return now - self._ready_at > self.limit

    def late(self, now: float) -> str | None:
        """What was waited for too long before MPI_Init: ranks whose processes are there for longer than the limit and are not ready."""
        if self._ready_at is not None or self.up() or self._count("started-mpi") < self.ranks:
            return None
        self._there_at = now if self._there_at is None else self._there_at
        overdue = []
        ready = {path.name for path in self.folder.glob(f"{_READY}.*")}  # one look at the folder, not one for each of thousands of ranks
        for rank in range(self.ranks):
            if f"{_READY}.{rank}" in ready:
                continue
            doing, since, limit = self._doing(rank, now)
            self._tell(f"rank {rank} to be ready for MPI_Init{doing}", now - since, limit)
            if now - since > limit:
                overdue.append(f"{limit:.0f} s for rank {rank}{doing}")
        more = f" and {len(overdue) - 1} more" if len(overdue) > 1 else ""
        return f"waited {overdue[0]}{more} to be ready for MPI_Init" if overdue else None

    def _doing(self, rank: int, now: float) -> tuple[str, float, float]:
        """(what it is at, since when, seconds that it may take)."""
        assert self._there_at is not None
        try:
            said = (self.folder / f"{_BUSY}.{rank}").read_text()
        except FileNotFoundError:
            return "", self._there_at, self.limit
        if self._busy.get(rank, ("", 0.0))[0] != said:
            self._busy[rank] = said, now
        told = json.loads(said)
        return f" ({told['what']})", self._busy[rank][1], self.limit + float(told["seconds"])

    def _tell(self, name: str, waited: float, limit: float) -> None:
        """Once, at half time."""
        if waited > limit / 2 and name not in self._told:
            self._told.add(name)
            log.warning("still waiting for %s after %.0f s (deadline %.0f s)", name, waited, limit)

    def starting(self) -> bool:
        """Whether every rank has come as far as MPI_Init and not all are through: what fails now is MPI's start, nothing of ours."""
        return not self.up() and self._count(_READY) >= self.ranks

    def again(self) -> bool:
        """Whether another try is left; forgets the marks of this one (its processes must be gone), those of its start included."""
        if self.tries >= TRIES:
            return False
        self.tries += 1
        self._begin()
        for pattern in (f"{_READY}.*", f"{_THROUGH}.*", f"{_BUSY}.*", "started-mpi.*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        return True

    def _count(self, name: str) -> int:
        return sum(1 for _ in self.folder.glob(f"{name}.*"))
