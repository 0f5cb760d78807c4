"""The end of an attempt: who was to blame, and how everything is stopped.

Invariants: the verdict names the process that died first and how, or the cause it wrote down itself; `stop_all` returns within
`patience` + LEAVE + a few seconds and leaves nothing: first the stop file (the controller ends the step in hand), then SIGTERM to every group,
then SIGKILL, then whatever else still carries the attempt's mark in its environment, then the steps in Slurm whose client was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre_hpc import processes
from gyre_hpc.driver.launcher import MPI_STEP, Child, Launcher
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.failure import first_failure

STOP_FILE = "stop"
LEAVE = 4.0
"""Seconds for a process to end by itself once SIGTERM was sent."""
POLL = 0.05

log = logging.getLogger("gyre.driver")


def verdict(dead: Child, folder: Path) -> GyreError:
    """Why the attempt can't go on. A process killed by a signal can't have said why, and what others say then is only what it dragged down."""
    how = describe_status(dead.process.returncode)
    failure = first_failure(folder)
    killed = _signal_of(dead.process.returncode) is not None
    if failure is not None and (not killed or dead.name == MPI_STEP or failure.who == dead.name):
        return failure.error()
    what = "the MPI step (controller and cells)" if dead.name == MPI_STEP else dead.name
    return Resumable(f"{what} {how}; log: {dead.log}", "the same command resumes")


def describe_status(status: int) -> str:
    """In words: "was killed by SIGKILL", "ended with status 3"."""
    number = _signal_of(status)
    return f"ended with status {status}" if number is None else f"was killed by {number.name}"


def _signal_of(status: int) -> signal.Signals | None:
    """The signal behind a status: negative from a plain child, 128 + n from srun."""
    number = -status if status < 0 else status - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def stop_all(
    children: Sequence[Child], launcher: Launcher, folder: Path, patience: float, mark: str, hurry: Callable[[], bool]
) -> list[int]:
    """Stop everything; the pids of this node that could not be ended (none, unless the kernel holds them)."""
    with contextlib.suppress(OSError):  # the disk may be what is broken: SIGTERM follows anyway
        (folder / STOP_FILE).touch()
    mpi = [child for child in children if child.name == MPI_STEP]
    if patience > 0 and mpi:
        log.info("waiting up to %.0f s for the controller to end its step", patience)
        _wait(mpi, patience, hurry)
    for child in children:
        _send(child, signal.SIGTERM)
    _wait(children, LEAVE, hurry)
    stubborn = [child for child in children if child.process.poll() is None]
    for child in children:
        _send(child, signal.SIGKILL)
    for child in children:
        child.process.wait()
    left = processes.end_all(processes.marked(mark, str(folder)), 1.0)
    if stubborn:
        log.warning("killed after %.0f s: %s", LEAVE, ", ".join(child.name for child in stubborn))
        try:
            launcher.close()
        except GyreError as error:
            log.error("%s", error.line)
    return left


def _wait(children: Sequence[Child], seconds: float, hurry: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not hurry() and any(child.process.poll() is None for child in children):
        time.sleep(POLL)


def _send(child: Child, number: signal.Signals) -> None:
    """To the child's whole process group, which may outlive the child itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)
