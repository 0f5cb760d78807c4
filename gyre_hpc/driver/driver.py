"""The driver: owns a run directory, starts the processes of an attempt, watches them, and ends them all, whatever happens.

Invariants:
- one driver per run directory (runlock); every attempt has its own number, logs and runtime folder;
- a supervisor that is killed is started again, a few times; its node's executions are lost at once, and tried again. Any other child that
  ends unasked ends the attempt: all others are stopped within `deadlines.stop` plus a few seconds, one line says why, and
  the exit code is 75, because everything a process acknowledged is durable and the same command continues;
- the end of the MPI step with status 0 is the end of the run;
- a stop that was asked for (signal, time limit, disk) first lets the controller end the step in hand; see ending.py.
Order of an attempt: lock, disk, placement, model, gateway, runtime file, supervisors, MPI step, watch, stop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gyre_hpc import layout
from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.controller.live import read_live
from gyre_hpc.driver import disk, requeue, rundir
from gyre_hpc.driver.allocation import Allocation, Placement, find_allocation, place
from gyre_hpc.driver.ending import end_one, signal_of, stop_all, verdict
from gyre_hpc.driver.inputs import check_inputs
from gyre_hpc.driver.launcher import MPI_STEP, Child, Launcher, Surroundings, make_launcher, started
from gyre_hpc.driver.lines import printer
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.runlock import RENEW, RunLock
from gyre_hpc.driver.signals import TIME_UP, Signals
from gyre_hpc.driver.topology import find_topology
from gyre_hpc.driver.waiting import wait_for
from gyre_hpc.driver.world import TRIES, WorldWatch
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog, EventTail, read_events
from gyre_hpc.failure import first_failure
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import SECRET_VARIABLE, VARIABLE, Runtime, read_address

MARK = "GYRE_ATTEMPT"
"""In the environment of every process of an attempt: its runtime folder."""
WORLD_SIZE = "GYRE_WORLD_SIZE"
"""Ranks that the driver asked for: a library that gives singletons is found out by the first look at COMM_WORLD."""
POLL = 0.1
DISK_POLL = 5.0
SETTLE = 1.0
"""Seconds between a child's end and the verdict: a signal meant for all, or the failure file of the true culprit, may be under way."""
SAID = 5.0
"""Seconds after which a failure that a process wrote down ends the attempt though no child has died: mpiexec does not notice a rank that
ends before MPI_Init, where the others then wait for it for ever."""
MODEL_DEADLINE = 1800.0
SUPERVISOR = "supervisor-"
GONE_DEADLINE = 3.0
"""Seconds for the gateway to hear of it."""
SUPERVISOR_TRIES = 3
"""Times that one node's supervisor is started again in an attempt: a node that is broken kills it again and again."""

log = logging.getLogger("gyre.driver")
T = TypeVar("T")
Watcher = Callable[[RunPaths, threading.Event], None]


def drive(
    run_dir: Path,
    *,
    programs: Programs | None = None,
    allocation: Allocation | None = None,
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
    signals: Signals | None = None,
) -> ExitCode:
    """Run one attempt of the run in `run_dir` to its end. DONE, or RESUMABLE after a stop that was asked for; raises GyreError otherwise.

    `watcher` shows progress in a thread of its own; without one plain lines go to standard output. When Slurm's time is up the job
    is requeued. A run that has all its steps is done at once.
    """
    paths = RunPaths(run_dir.absolute())
    config = rundir.frozen(paths)
    with RunLock(paths.lock) as lock, signals or Signals() as caught:
        if is_finished(paths, config):
            say(f"{paths.root} is done: all {config.run.steps} steps; a larger run.steps continues it")
            return ExitCode.DONE
        disk.check_start(paths.root, config.run.min_free_mb)
        allocation = allocation or find_allocation()
        world = World(
            allocation,
            placement(allocation, config),
            launcher or make_launcher(allocation, config.slurm.srun_options),
            programs or Programs(),
        )
        code = Attempt(paths, config, world, lock, caught, watcher).run()
    if code == ExitCode.RESUMABLE and caught.time_up and allocation.job is not None:
        _requeue(allocation, config)
    return code


@dataclass(frozen=True)
class World:
    """Where an attempt runs and what it runs there."""

    allocation: Allocation
    placement: Placement
    launcher: Launcher
    programs: Programs


def placement(allocation: Allocation, config: Config) -> Placement:
    """Who goes where, by the network where Slurm knows it; says what is wasted or crowded. Raises ConfigError for what can't be."""
    local = allocation.job is None
    lines = layout.waste(config)
    crowded = layout.crowd(config, len(os.sched_getaffinity(0))) if local else None
    for line in [*lines, crowded]:
        if line is not None:
            say(f"gyre: {line}")
    return place(allocation.nodes, config.cells, local, None if local else find_topology())


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
        self.children: list[Child] = []
        self._ranks = WorldWatch(self.folder, len(world.placement.ranks), config.deadlines.start)
        self._start_ranks: Callable[[], Child] | None = None
        self._start_supervisor: Callable[[str], Child] | None = None
        self._control: ControlClient | None = None
        self._lives: Counter[str] = Counter()
        """Times that each supervisor was started again."""
        self._awaited: list[tuple[Child, float]] = []
        """Started again, and until when they must have left their marks."""
        self._tail = EventTail(paths.events)
        self._tail.read()
        self._show = printer(say) if watcher is None else None
        self._disk_at = 0.0
        self._said_at: float | None = None
        self._look_at = 0.0
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
        with _log_file(self.logs / "driver.log"), self._progress():
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
        if self.number > 1:
            self.events.emit("resume", attempt=self.number, step=last_checkpoint(self.paths))

    def _start(self) -> None:
        world, limit = self.world, self.config.deadlines.start
        secret = secrets.token_hex(32)
        early = Surroundings(self.folder, self.logs, {MARK: str(self.folder), SECRET_VARIABLE: secret})
        self._model(early)
        # one node alone is served on loopback; several need the name under which the first is known
        host = socket.gethostname() if len(world.allocation.nodes) > 1 else None
        self._add(world.launcher.child("gateway", world.programs.gateway(self.paths.root, self.number, host), early))
        address = self._await("the gateway to listen", lambda: read_address(self.folder), limit)
        pool = len(world.placement.standalone)
        runtime = Runtime(self.paths.root, self.number, secret, address.url, address.socket, pool).write(self.folder)
        extra = {MARK: str(self.folder), VARIABLE: str(runtime), WORLD_SIZE: str(len(world.placement.ranks))}
        where = Surroundings(self.folder, self.logs, extra)
        self._control = ControlClient(address.url, secret, GONE_DEADLINE)
        self._start_supervisor = lambda node: world.launcher.on_node(SUPERVISOR + node, node, world.programs.supervisor(node), where)
        for node in world.allocation.nodes:
            self._add(self._start_supervisor(node))
        self._start_ranks = lambda: world.launcher.mpi(world.programs.mpi(), world.placement, where)
        self._add(self._start_ranks())
        for child in list(self.children):
            self._await_marks(child, limit)
        log.info("all %d processes started", sum(child.marks for child in self.children))

    def _model(self, where: Surroundings) -> None:
        """Inputs are checked; the built-in model is made by a child, once (torch, a minute or two), so that the driver keeps listening."""
        check_inputs(self.config)
        if self.config.model.path != BUILTIN_MODEL:
            return
        child = self.world.launcher.child("model", self.world.programs.model(), where)
        self.children.append(child)
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
        self.children.remove(child)
        if child.process.returncode:
            raise verdict(child, self.folder)

    def _add(self, child: Child) -> None:
        self.children.append(child)
        log.info("started %s (pid %d), log %s", child.name, child.process.pid, child.log)

    def _await_marks(self, child: Child, limit: float) -> None:
        self._await(f"{child.name} to start", lambda: len(started(child, self.folder)) >= child.marks, limit)

    def _await(self, name: str, condition: Callable[[], T | None], limit: float, watch_children: bool = True) -> T:
        """A wait that ends early when a child dies or a stop is asked for."""

        def probe() -> T | None:
            value = condition()
            if not value:
                self._upkeep()
                if watch_children:
                    self._check_children()
            return value

        return wait_for(name, probe, limit)

    # -- watch ------------------------------------------------------------------------------------------------------------------
    def _watch(self) -> ExitCode:
        """Until the MPI step is done; raises Asked or the failure."""
        while True:
            if self._check_children():
                return ExitCode.DONE
            self._upkeep()
            time.sleep(POLL)

    def _check_children(self) -> bool:
        """Whether the run is finished. Raises the failure when a child ended otherwise."""
        dead = next((child for child in self.children if child.process.poll() is not None), None)
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
            self._check_asked()
            time.sleep(POLL)
        if dead.name == MPI_STEP and self._ranks.starting() and first_failure(self.folder) is None:
            return self._again(dead, f"MPI did not start: the step ended with status {dead.process.returncode}")
        if self._supervise_again(dead):
            return False
        raise verdict(dead, self.folder)

    def _supervise_again(self, dead: Child) -> bool:
        """Start a supervisor that was killed again; False: this is another child, or it said why it ends, or it dies too often."""
        killed = signal_of(dead) is not None and first_failure(self.folder) is None
        if not dead.name.startswith(SUPERVISOR) or not killed or self._lives[dead.name] >= SUPERVISOR_TRIES:
            return False
        if self._control is None or self._start_supervisor is None:
            return False
        node = dead.name.removeprefix(SUPERVISOR)
        self._lives[dead.name] += 1
        end_one(dead, self.world.launcher, self.folder, MARK)
        try:
            lost = self._control.node_gone(node)
        except GyreError as error:  # the gateway is gone as well: that ends the attempt in any case
            log.warning("%s", error.line)
            return False
        log.warning("%s was killed, %d executions are lost and tried again; starting it again", dead.name, len(lost))
        self.children.remove(dead)
        self.events.emit("supervisor.again", node=node, lost=len(lost), tries=self._lives[dead.name], attempt=self.number)
        for mark in self.folder.glob(f"started-{dead.name}.*json"):
            mark.unlink(missing_ok=True)
        self._add_again(self._start_supervisor(node))
        return True

    def _check_world(self) -> None:
        """Ranks that hang in MPI_Init are started again."""
        if self._ranks.hangs(time.monotonic()):
            mpi = next(child for child in self.children if child.name == MPI_STEP)
            self._again(mpi, f"MPI did not start: ranks hang in MPI_Init since {self._ranks.limit:.0f} s")

    def _again(self, mpi: Child, why: str) -> bool:
        """Start the ranks again (False: the run is not finished). Raises Resumable when they were started often enough."""
        assert self._start_ranks is not None
        self.children.remove(mpi)
        end_one(mpi, self.world.launcher, self.folder, MARK)
        tries = self._ranks.tries
        if not self._ranks.again():
            raise Resumable(f"{why}, {TRIES} times; log: {mpi.log}", "`gyre doctor`; MPIR_CVAR_CH4_NETMOD chooses MPICH's network")
        log.warning("%s; starting it again (try %d of %d), log %s", why, tries + 1, TRIES, mpi.log)
        self.events.emit("mpi.again", attempt=self.number, tries=tries + 1, why=why)
        self._add_again(self._start_ranks())
        return False

    def _add_again(self, child: Child) -> None:
        self._add(child)
        self._awaited.append((child, time.monotonic() + self.config.deadlines.start))

    def _check_marks(self) -> None:
        """What was started again must start: a step may wait in Slurm for ever. Raises Resumable."""
        waiting = [(child, end) for child, end in self._awaited if child in self.children]
        self._awaited = [(child, end) for child, end in waiting if len(started(child, self.folder)) < child.marks]
        late = next((child for child, end in self._awaited if time.monotonic() > end), None)
        if late is not None:
            raise Resumable(
                f"waited {self.config.deadlines.start:.0f} s for {late.name} to start again", "see driver.log; the same command resumes"
            )

    def _check_said(self) -> None:
        """Raises a failure that a process wrote down a while ago without taking its step along."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        failure = first_failure(self.folder)
        if failure is None:
            return
        if self._said_at is None:
            self._said_at = now
            log.info("%s says that it ends: %s", failure.who, failure.what)
        elif now - self._said_at >= SAID:
            raise failure.error()

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
        if self.signals.stop is not None:
            raise Asked

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
        left = stop_all(self.children, self.world.launcher, self.folder, patience, MARK, lambda: self.signals.hurry, leave)
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


# -- helpers --------------------------------------------------------------------------------------------------------------------
def next_attempt(paths: RunPaths) -> int:
    """One more than the attempts that have left logs or a runtime folder."""
    numbers = [
        int(found[1])
        for folder in (paths.logs, paths.root / "runtime")
        if folder.is_dir()
        for p in folder.iterdir()
        if (found := re.fullmatch(r"attempt-(\d+)", p.name))
    ]
    return max(numbers, default=0) + 1


def last_checkpoint(paths: RunPaths) -> int:
    """The step of the newest checkpoint that the event log tells of; 0 if there is none."""
    return max((int(event["step"]) for event in read_events(paths.events) if event["kind"] == "checkpoint"), default=0)


def is_finished(paths: RunPaths, config: Config) -> bool:
    """Whether the last attempt ended as done and no further steps are wanted."""
    status, step = "", 0
    for event in read_events(paths.events):
        if event["kind"] == "run.end":
            status = event["status"]
        elif event["kind"] == "step.end":
            step = max(step, int(event["step"]))
    return status == "done" and step >= config.run.steps


def write_report(run_dir: Path) -> None:
    """The report at the end of a run; a run that is done stays done when its report fails."""
    from gyre_hpc.report.html import write

    paths = RunPaths(run_dir)
    try:
        write(paths)
        say(f"report: {paths.report}")
    except (GyreError, OSError) as error:
        say(f"no report: {error}; `gyre report {run_dir}` tries again")


def say(line: str) -> None:
    print(line, flush=True, file=sys.stdout)


def _requeue(allocation: Allocation, config: Config) -> None:
    """Put the job back into the queue. Raises Resumable when it has been there too often."""
    if allocation.restarts >= config.slurm.max_requeues:
        raise Resumable(
            f"job {allocation.job} was requeued {allocation.restarts} times (slurm.max_requeues)", "submit it again: it resumes"
        )
    job = requeue.job_name() or str(allocation.job)
    requeue.requeue(job)
    say(f"job {job} is requeued and will resume")


def _from_os(error: OSError) -> GyreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Resumable(f"disk full: {error.filename or error}", "free space in the run directory; the same command resumes")
    return Resumable(f"driver: {error}", "the same command resumes once that is mended")


class _QuietHandler(logging.FileHandler):
    """A log that can't be written (a full disk) must not bury the one line that says so under tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = _QuietHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
