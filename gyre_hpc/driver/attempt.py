"""One attempt of a run: its processes are started, watched and ended, whatever happens.

Invariants: every attempt has its own number, logs and runtime folder; every way out leads through the stop, which ends all processes within
`deadlines.stop` plus a few seconds; a stop that was asked for (signal, time limit, disk) first lets the controller end the step in hand
(ending.py). Who is started again, and whose end is the end: children.py.
Order: inputs, model, gateway, runtime file, supervisors, MPI step, watch, stop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.controller.live import read_live
from gyre_hpc.driver import disk
from gyre_hpc.driver.allocation import Allocation, Placement
from gyre_hpc.driver.children import MARK, POLL, SUPERVISOR, Children, Starters
from gyre_hpc.driver.ending import stop_all, verdict
from gyre_hpc.driver.history import next_attempt
from gyre_hpc.driver.inputs import check_inputs
from gyre_hpc.driver.launcher import Child, Launcher, Surroundings, started
from gyre_hpc.driver.lines import printer, say
from gyre_hpc.driver.logfile import log_file
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.runlock import RENEW, STALE, RunLock
from gyre_hpc.driver.signals import TIME_UP, Signals
from gyre_hpc.driver.waiting import wait_for
from gyre_hpc.driver.world import WorldWatch
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog, EventTail
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import SECRET_VARIABLE, VARIABLE, Runtime, read_address
from gyre_hpc.stopfile import wished

DISK_POLL = 5.0
MODEL_DEADLINE = 1800.0
WISH = 0.5
"""Seconds from a rank's SIGTERM until it counts: less than what `SETTLE` gives the verdict on a supervisor that got it as well."""

log = logging.getLogger("gyre.driver")
T = TypeVar("T")
Watcher = Callable[[RunPaths, threading.Event], None]


@dataclass(frozen=True)
class World:
    """Where an attempt runs and what it runs there."""

    allocation: Allocation
    placement: Placement
    launcher: Launcher
    programs: Programs


class Asked(Exception):
    """A stop was asked for while the attempt was still starting."""


class Attempt:
    """One attempt; `run` is its whole life."""

    def __init__(self, paths: RunPaths, config: Config, world: World, lock: RunLock, signals: Signals, watcher: Watcher | None) -> None:
        self.paths, self.config, self.world, self.lock, self.signals, self.watcher = paths, config, world, lock, signals, watcher
        self.number = next_attempt(paths)
        self.folder = paths.runtime(self.number)
        self.logs = paths.attempt_logs(self.number)
        self.events = EventLog(paths.events)
        ranks = WorldWatch(self.folder, len(world.placement.ranks), config.deadlines.start)
        self.children = Children(self.folder, world.launcher, self.events, self.number, ranks, config.deadlines.start, self._check_asked)
        self._tail = EventTail(paths.events)
        self._tail.read()
        self._show = printer(say) if watcher is None else None
        self._disk_at = 0.0
        self._wished_at: float | None = None
        self._renew_at = time.monotonic() + RENEW

    def run(self) -> ExitCode:
        """Start, watch, stop. Every way out leads through the stop."""
        self.logs.mkdir(parents=True)
        shutil.rmtree(self.folder.parent, ignore_errors=True)  # what attempts left whose driver was killed: secrets, marks
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o700)
        begun = time.monotonic()
        error: GyreError | None = None
        code = ExitCode.RESUMABLE
        with log_file(self.logs / "driver.log"), self._progress():
            try:
                self._announce()
                self._start()
                code = self._watch()
            except Asked:
                log.info("stop asked for by %s", self.signals.stop)
            except GyreError as failure:
                error = failure
            except OSError as failure:
                error = _from_os(failure)
            finally:
                self._stop(ExitCode.FAILED if error is not None else code)
            self._conclude(code, error, time.monotonic() - begun)
        if error is not None:
            raise error
        return code

    # -- start ------------------------------------------------------------------------------------------------------------------
    def _announce(self) -> None:
        where, facts = self.world.allocation, self.world.placement.facts()
        log.info("attempt %d on %s (%s)", self.number, ", ".join(where.nodes), f"job {where.job}" if where.job else "no Slurm")
        self.events.emit("run.start", attempt=self.number, launcher=where.launcher, job=where.job, nodes=list(where.nodes), **facts)
        if self.world.placement.straddling:
            log.info("%d cells straddle switches: %s", self.world.placement.straddling, facts["switches"])

    def _start(self) -> None:
        world, limit = self.world, self.config.deadlines.start
        secret = secrets.token_hex(32)
        early = Surroundings(self.folder, self.logs, {MARK: str(self.folder), SECRET_VARIABLE: secret})
        self._model(early)
        # one node alone is served on loopback; several need the name under which the first is known
        host = socket.gethostname() if len(world.allocation.nodes) > 1 else None
        self.children.add(world.launcher.child("gateway", world.programs.gateway(self.paths.root, self.number, host), early))
        address = self._await("the gateway to listen", lambda: read_address(self.folder), limit)
        pool = len(world.placement.standalone)
        runtime = Runtime(self.paths.root, self.number, secret, address.url, address.socket, pool).write(self.folder)
        extra = {MARK: str(self.folder), VARIABLE: str(runtime)}
        where = Surroundings(self.folder, self.logs, extra)
        starters = Starters(
            ranks=lambda: world.launcher.mpi(world.programs.mpi(), world.placement, where),
            supervisor=lambda node: world.launcher.on_node(SUPERVISOR + node, node, world.programs.supervisor(node), where),
            # the lock is not renewed while the driver asks: it must not look stale
            control=ControlClient(address.url, secret, min(self.config.deadlines.gateway, STALE / 3)),
        )
        self.children.start(world.allocation.nodes, starters)
        for child in list(self.children.living):
            self._await_marks(child, limit)
        log.info("all %d processes started", sum(child.marks for child in self.children.living))

    def _model(self, where: Surroundings) -> None:
        """Inputs are checked; the built-in model is made by a child, once (torch, a minute or two), so that the driver keeps listening."""
        check_inputs(self.config)
        if self.config.model.path != BUILTIN_MODEL:
            return
        child = self.world.launcher.child("model", self.world.programs.model(), where)
        self.children.living.append(child)
        shown = 0

        def finished() -> bool:
            nonlocal shown
            lines = child.log.read_text(errors="replace").splitlines() if child.log.exists() else []
            if self._show is not None:
                for line in lines[shown:]:
                    say(line)
            shown = len(lines)
            return child.process.poll() is not None

        self._await("the small model to be built", finished, MODEL_DEADLINE, watch_children=False)
        self.children.living.remove(child)
        if child.process.returncode:
            raise verdict(child, self.folder)

    def _await_marks(self, child: Child, limit: float) -> None:
        self._await(f"{child.name} to start", lambda: len(started(child, self.folder)) >= child.marks, limit)

    def _await(self, name: str, condition: Callable[[], T | None], limit: float, watch_children: bool = True) -> T:
        """A wait that ends early when a child dies or a stop is asked for."""

        def probe() -> T | None:
            value = condition()
            if not value:
                self._upkeep()
                if watch_children:
                    self.children.check()
            return value

        return wait_for(name, probe, limit)

    # -- watch ------------------------------------------------------------------------------------------------------------------
    def _watch(self) -> ExitCode:
        """Until the MPI step is done; raises Asked or the failure."""
        while True:
            if self.children.check():
                return ExitCode.DONE
            self._upkeep()
            time.sleep(POLL)

    def _upkeep(self) -> None:
        """What must go on in every wait: show progress, keep the lock, look at the disk, the clock and the signals."""
        self._show_events()
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + RENEW
            self.lock.renew()
        if now >= self._disk_at:
            self._disk_at = now + DISK_POLL
            full = disk.check_running(self.paths.root, self.config.run.min_free_mb)
            if full is not None:
                raise full
        end = self.world.allocation.end
        if end is not None and not self.signals.received and time.time() >= end - self.config.slurm.signal_seconds:
            log.info("the job's time limit is %.0f s away", end - time.time())
            self.signals.request(TIME_UP[0])
        self._check_asked()

    def _show_events(self) -> None:
        events = self._tail.read()
        if self._show is not None:
            self._show(events)

    def _check_asked(self) -> None:
        if self.signals.stop is None and self._wished():
            log.info("processes of the run got SIGTERM: somebody wants it to stop")
            self.signals.request(signal.SIGTERM)
        if self.signals.stop is not None:
            raise Asked

    def _wished(self) -> bool:
        """Whether SIGTERM that ranks got means a stop: not where one of them died, for its launcher may then send it to the others."""
        if not wished(self.folder):
            self._wished_at = None  # of ranks that have ended since, and were started again
            return False
        self._wished_at = time.monotonic() if self._wished_at is None else self._wished_at
        return time.monotonic() - self._wished_at > WISH and not self.children.died()

    # -- end --------------------------------------------------------------------------------------------------------------------
    def _stop(self, code: ExitCode) -> None:
        """As much time as the reason allows: for the controller's step when a stop was asked for, for the last seal when all is done.

        Before the controller shows itself in live.json there is no step, and nobody who looks for the stop file.
        """
        limit = self.config.deadlines.stop
        live = read_live(self.paths.live)
        listens = live is not None and live.get("attempt") == self.number
        patience = limit if code == ExitCode.RESUMABLE and listens else 0.0
        leave = limit if code == ExitCode.DONE else None
        left = stop_all(self.children.living, self.world.launcher, self.folder, patience, MARK, lambda: self.signals.hurry, leave)
        if left:
            log.error("could not end processes %s", left)

    def _conclude(self, code: ExitCode, error: GyreError | None, seconds: float) -> None:
        if error is not None:
            code = error.exit_code
            log.error("%s", error.line)
        elif code == ExitCode.RESUMABLE:
            line = f"stopped by {self.signals.stop.name if self.signals.stop else 'request'}; the same command resumes"
            log.info("%s", line)
            self._show_events()
            say(line)
        status = "done" if code == ExitCode.DONE else "stopped" if code == ExitCode.RESUMABLE else "failed"
        try:
            if error is not None:
                self.events.emit("failure", what=error.what, remedy=error.remedy, attempt=self.number)
            self.events.emit("run.end", attempt=self.number, status=status, exit_code=int(code), seconds=round(seconds, 3))
        except OSError as full:
            log.error("the end could not be written to events.jsonl: %s", full)
        self._show_events()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.events.forget()
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        if self.watcher is None:
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(target=self.watcher, args=(self.paths, stop), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(5.0)


def _from_os(error: OSError) -> GyreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Resumable(f"disk full: {error.filename or error}", "free space in the run directory; the same command resumes")
    return Resumable(f"driver: {error}", "the same command resumes once that is mended")
