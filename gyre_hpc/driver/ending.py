"""The end of an attempt: who was to blame, and how everything is stopped.

Invariants: the verdict names the process that died first and how, or the cause it wrote down itself; `stop_all` returns within `patience`
+ `leave` + a few seconds and leaves nothing: first the stop file (the controller ends the step in hand, saves what no checkpoint has, and
sees in the file how long it may take), then SIGTERM to every group, then SIGKILL, then whatever else still carries the attempt's mark in
its environment, then the steps in Slurm whose client was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from gyre_hpc import processes, stopfile
from gyre_hpc.driver.launcher import MPI_STEP, Child, Launcher, started
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.failure import first_failure

MPIEXEC_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
LEAVE = 4.0
"""Seconds for a process to end by itself once SIGTERM was sent."""
HURRIED = 1.0
"""The same when somebody is in a hurry: enough to remove what lies in the node's temporary folder and in its cgroups."""
POLL = 0.05

log = logging.getLogger("gyre.driver")


def verdict(dead: Child, folder: Path) -> GyreError:
    """Why the attempt can't go on.

    A process killed by a signal can't have said why, and what the others wrote down then is only what its death dragged down.
    """
    number = signal_of(dead)
    failure = first_failure(folder)
    if failure is not None and not failure.consequence and (number is None or dead.name == MPI_STEP or failure.who == dead.name):
        return failure.error()
    if dead.name == MPI_STEP:
        number = _task_signal(dead) or number
    if number is None and failure is not None:
        return failure.error()
    how = f"ended with status {dead.process.returncode}" if number is None else f"was killed by {number.name}"
    return Resumable(f"{_whose(dead)} {how}; log: {dead.log}", "the same command resumes")


def signal_of(dead: Child) -> signal.Signals | None:
    """The signal behind an exit status: negative of a plain child, 128 + n from srun, n itself from mpiexec."""
    status = dead.process.returncode
    number = -status if status < 0 else status - 128
    if dead.name == MPI_STEP and status in MPIEXEC_SIGNALS:
        number = status
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _whose(dead: Child) -> str:
    """The name of a child. Of the MPI step, srun tells which task died first; mpiexec names a process, but not the right one."""
    if dead.name != MPI_STEP:
        return dead.name
    found = _first_task(dead)
    if found is None:
        return "a rank of the MPI step (controller or cells)"
    return "the controller (rank 0)" if found[0] == 0 else f"rank {found[0]} (a cell)"


def _first_task(mpi: Child) -> tuple[int, str] | None:
    """(rank, how) of the task whose end srun told first."""
    with open(mpi.log, "rb") as f:
        f.seek(max(0, mpi.log.stat().st_size - 65536))
        found = re.search(rb"error: \S+: tasks? (\d+)[-,\d]*: (.*)", f.read())
    return None if found is None else (int(found[1]), found[2].decode(errors="replace").strip())


def _task_signal(mpi: Child) -> signal.Signals | None:
    """The signal in srun's words: its own exit status is another task's where several ended."""
    found = _first_task(mpi)
    return None if found is None else next((number for number in MPIEXEC_SIGNALS if signal.strsignal(number) == found[1]), None)


def stop_all(
    children: Sequence[Child],
    launcher: Launcher,
    folder: Path,
    patience: float,
    mark: str,
    hurry: Callable[[], bool],
    leave: float | None = None,
) -> list[int]:
    """Stop everything; the pids of this node that could not be ended (none, unless the kernel holds them).

    `leave`: seconds between SIGTERM and SIGKILL, LEAVE unless there is time (the gateway seals its last records then).
    """
    leave = LEAVE if leave is None else leave
    with contextlib.suppress(OSError):  # the disk may be what is broken: SIGTERM follows anyway
        stopfile.ask(folder, patience)
    mpi = [child for child in children if child.name == MPI_STEP]
    if patience > 0 and mpi:
        log.info("waiting up to %.0f s for the controller to end its step", patience)
        _wait(mpi, patience, hurry)
    with contextlib.suppress(OSError):  # nobody has to go on for anybody any more: SIGTERM now ends also who passed one on
        stopfile.ask(folder, 0.0)
    for child in children:
        _send(child, signal.SIGTERM)
    begun = time.monotonic()
    _wait(children, leave, lambda: hurry() and time.monotonic() - begun > HURRIED)
    stubborn = [child for child in children if child.process.poll() is None]
    for child in children:
        _send(child, signal.SIGKILL)
    for child in children:
        child.process.wait()
    left = processes.end_all(processes.marked(mark, str(folder)), 1.0)
    if stubborn:
        log.warning("killed after %.0f s: %s", leave, ", ".join(child.name for child in stubborn))
        try:
            launcher.close()
        except GyreError as error:
            log.error("%s", error.line)
    return left


def end_one(child: Child, launcher: Launcher, folder: Path, mark: str) -> None:
    """End one child and what it started here and elsewhere; the others live on."""
    ours = {(note["node"], note["pid"]) for note in started(child, folder)}
    # nodes that booted alike hand out the same pids: one of another node may here be the gateway's
    marked = [process for process in processes.marked(mark, str(folder)) if (_node_of(process), process.pid) in ours]
    _send(child, signal.SIGTERM)
    _wait([child], LEAVE, lambda: False)
    _send(child, signal.SIGKILL)
    child.process.wait()
    processes.end_all(marked, 1.0)
    try:
        launcher.close(child.name)
    except GyreError as error:
        log.error("%s", error.line)


def _node_of(process: psutil.Process) -> str:
    """The node's name as the process itself has left it in its start mark (driver/step.py); empty when it is gone."""
    try:
        return process.environ().get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    except psutil.Error:
        return ""


def _wait(children: Sequence[Child], seconds: float, hurry: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not hurry() and any(child.process.poll() is None for child in children):
        time.sleep(POLL)


def _send(child: Child, number: signal.Signals) -> None:
    """To the child's whole process group, which may outlive the child itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)
