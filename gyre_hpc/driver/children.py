"""The children of an attempt: which live, which of them are started again when they die, and why the others end it.

Invariants:
- a supervisor that is killed is started again, a few times; its node's executions are lost at once, and tried again. Ranks whose MPI
  does not come up are started again (world.py). Any other child that ends unasked ends the attempt, by a raised failure;
- the end of the MPI step with status 0 is the end of the run;
- what was started again must leave its marks within the start deadline: a step may wait in Slurm for ever.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc import stopfile
from gyre_hpc.driver.ending import end_one, signal_of, verdict
from gyre_hpc.driver.launcher import MPI_STEP, Child, Launcher, started
from gyre_hpc.driver.world import TRIES, WorldWatch
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.events import EventLog
from gyre_hpc.failure import first_failure
from gyre_hpc.gateway.client import ControlClient

MARK = "GYRE_ATTEMPT"
"""In the environment of every process of an attempt: its runtime folder."""
POLL = 0.1
SETTLE = 1.0
"""Seconds between a child's end and the verdict: a signal meant for all, or the failure file of the true culprit, may be under way."""
SAID = 5.0
"""Seconds after which a failure that a process wrote down ends the attempt though no child has died: mpiexec does not notice a rank that
ends before MPI_Init, where the others then wait for it for ever."""
SUPERVISOR = "supervisor-"
GATEWAY = "gateway"
SUPERVISOR_TRIES = 3
"""Times that one node's supervisor is started again in an attempt: a node that is broken kills it again and again."""

log = logging.getLogger("gyre.driver")


@dataclass(frozen=True)
class Starters:
    """How children are started, the first time and again; `control` is where the gateway hears that a node is gone."""

    ranks: Callable[[], Child]
    supervisor: Callable[[str], Child]
    control: ControlClient


class Children:
    """Those of one attempt. `limit`: seconds for a start; `asked` raises when a stop was asked for."""

    def __init__(
        self, folder: Path, launcher: Launcher, events: EventLog, attempt: int, ranks: WorldWatch, limit: float, asked: Callable[[], None]
    ) -> None:
        self._folder, self._launcher, self._events, self._attempt = folder, launcher, events, attempt
        self.ranks, self._limit, self._asked = ranks, limit, asked
        self.living: list[Child] = []
        self._starters: Starters | None = None
        self._lives: Counter[str] = Counter()
        """Times that each supervisor was started again."""
        self._awaited: list[tuple[Child, float]] = []
        """Started again, and until when they must have left their marks."""
        self._said_at: float | None = None
        self._look_at = 0.0

    def start(self, nodes: tuple[str, ...], starters: Starters) -> None:
        """A supervisor on each node, and the ranks; from now on they may be started again."""
        self._starters = starters
        for node in nodes:
            self.add(starters.supervisor(node))
        self.add(starters.ranks())

    def add(self, child: Child) -> None:
        self.living.append(child)
        log.info("started %s (pid %d), log %s", child.name, child.process.pid, child.log)

    def add_again(self, child: Child) -> None:
        """It stands for one that was ended, and must leave its marks within the start deadline."""
        self.add(child)
        self._awaited.append((child, time.monotonic() + self._limit))

    def check(self) -> bool:
        """Whether the run is finished. Raises the failure when a child ended otherwise."""
        dead = next((child for child in self.living if child.process.poll() is not None), None)
        if dead is None:
            self._check_said()
            self._check_world()
            self._check_marks()
            return False
        if dead.name == MPI_STEP and dead.process.returncode == 0:
            return True
        log.info("%s ended with status %s", dead.name, dead.process.returncode)
        settled = time.monotonic() + SETTLE
        while time.monotonic() < settled:
            self._asked()
            time.sleep(POLL)
        if dead.name == MPI_STEP and self.ranks.starting() and first_failure(self._folder) is None:
            return self._again(dead, f"MPI did not start: the step ended with status {dead.process.returncode}")
        if self._supervise_again(dead):
            return False
        raise verdict(self._to_blame(dead), self._folder)

    def died(self) -> bool:
        """Whether the ranks have ended, or any process has said why it must."""
        ranks = next((child for child in self.living if child.name == MPI_STEP), None)
        return (ranks is not None and ranks.process.poll() is not None) or first_failure(self._folder) is not None

    def _to_blame(self, dead: Child) -> Child:
        """Who ends the attempt: a supervisor that was killed does not, so where the gateway is gone as well it is the gateway."""
        gone = next((child for child in self.living if child.name == GATEWAY and child.process.poll() is not None), None)
        return gone if gone is not None and dead.name.startswith(SUPERVISOR) and signal_of(dead) is not None else dead

    def _supervise_again(self, dead: Child) -> bool:
        """Start a supervisor that was killed again; False: this is another child, or it said why it ends, or it dies too often."""
        killed = signal_of(dead) is not None and first_failure(self._folder) is None
        if not dead.name.startswith(SUPERVISOR) or not killed or self._lives[dead.name] >= SUPERVISOR_TRIES:
            return False
        if self._starters is None or any(child.name == GATEWAY and child.process.poll() is not None for child in self.living):
            return False
        node = dead.name.removeprefix(SUPERVISOR)
        self._lives[dead.name] += 1
        end_one(dead, self._launcher, self._folder, MARK)
        try:
            lost = self._starters.control.node_gone(node)
        except GyreError as error:  # the gateway is gone as well: that ends the attempt in any case
            log.warning("%s", error.line)
            return False
        log.warning("%s was killed, %d executions are lost and tried again; starting it again", dead.name, len(lost))
        self.living.remove(dead)
        self._events.emit("supervisor.again", node=node, lost=len(lost), tries=self._lives[dead.name], attempt=self._attempt)
        for mark in self._folder.glob(f"started-{dead.name}.*json"):
            mark.unlink(missing_ok=True)
        self.add_again(self._starters.supervisor(node))
        return True

    def _check_world(self) -> None:
        """Ranks that hang in MPI_Init are started again. Raises Resumable for those that never come as far."""
        late = self.ranks.late(time.monotonic())
        if late is not None:
            raise Resumable(late, "see mpi.log (its node's file system may be stuck; deadlines.start); the same command resumes")
        if self.ranks.hangs(time.monotonic()):
            mpi = next(child for child in self.living if child.name == MPI_STEP)
            self._again(mpi, f"MPI did not start: ranks hang in MPI_Init since {self.ranks.limit:.0f} s")

    def _again(self, mpi: Child, why: str) -> bool:
        """Start the ranks again (False: the run is not finished). Raises Resumable when they were started often enough."""
        assert self._starters is not None
        stopfile.ask(self._folder, 0.0)  # a rank that SIGTERM reaches is to die of it, not to pass it on
        end_one(mpi, self._launcher, self._folder, MARK)
        stopfile.withdraw(self._folder)
        self.living.remove(mpi)  # not before: where the disk is full they are still to be ended
        tries = self.ranks.tries
        if not self.ranks.again():
            raise Resumable(f"{why}, {TRIES} times; log: {mpi.log}", "`gyre doctor`; MPIR_CVAR_CH4_NETMOD chooses MPICH's network")
        log.warning("%s; starting it again (try %d of %d), log %s", why, tries + 1, TRIES, mpi.log)
        self._events.emit("mpi.again", attempt=self._attempt, tries=tries + 1, why=why)
        self.add_again(self._starters.ranks())
        return False

    def _check_marks(self) -> None:
        """What was started again must start: a step may wait in Slurm for ever. Raises Resumable."""
        waiting = [(child, end) for child, end in self._awaited if child in self.living]
        self._awaited = [(child, end) for child, end in waiting if len(started(child, self._folder)) < child.marks]
        late = next((child for child, end in self._awaited if time.monotonic() > end), None)
        if late is not None:
            raise Resumable(f"waited {self._limit:.0f} s for {late.name} to start again", "see driver.log; the same command resumes")

    def _check_said(self) -> None:
        """Raises a failure that a process wrote down a while ago without taking its step along."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        failure = first_failure(self._folder)
        if failure is None:
            return
        if self._said_at is None:
            self._said_at = now
            log.info("%s says that it ends: %s", failure.who, failure.what)
        elif now - self._said_at >= SAID:
            raise failure.error()
