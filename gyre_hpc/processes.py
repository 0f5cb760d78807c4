"""Child processes: how they are started, and how nothing of them is left.

Invariants:
- a child never outlives its parent: the kernel sends it `death_signal` when the parent dies, however it dies (PR_SET_PDEATHSIG). The kernel
  means the *thread* that forked, so children are forked by the main thread or by one thread that lives as long as the process;
- a child leads its own session and process group, so that `stop` reaches everything it started;
- a child sees nothing of our MPI or Slurm world: with inherited PMI variables its own MPI_Init may take the whole step with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

import psutil

_SCRUBBED_PREFIXES = ("PMI_", "PMI2_", "PMIX_", "PMI", "OMPI_", "PRTE_", "MPI", "SLURM_", "HYDRA", "HYDI")
# what a rank sets for torch.distributed; a child that starts a world of its own must not find it
_SCRUBBED_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_PR_SET_PDEATHSIG = 1
_POLL = 0.02


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without the launchers' variables (PMI, OMPI, MPI, SLURM, HYDRA, torch's rank), plus `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_SCRUBBED_PREFIXES) and k not in _SCRUBBED_NAMES}
    kept.update(extra or {})
    return kept


def die_with_parent(death_signal: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that has the kernel send `death_signal` to the child when the forking thread ends."""
    prctl = _libc().prctl
    parent = os.getpid()

    def preexec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return preexec


def spawn(
    argv: Sequence[str],
    log: Path | IO[bytes] | int,
    env: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    death_signal: int = signal.SIGKILL,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv` with both outputs appended to `log` (a path, an open file or a subprocess constant). Raises OSError.

    `env` is the complete environment; None means `child_environment()`.
    """
    environment = dict(env) if env is not None else child_environment()

    def start() -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            target: IO[bytes] | int
            if isinstance(log, Path):
                log.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(open(log, "ab"))
            else:
                target = log
            return subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=target,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
                preexec_fn=die_with_parent(death_signal),
            )

    if threading.current_thread() is threading.main_thread():
        return start()
    return _forker().submit(start).result()


def python(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of ours with this interpreter. A user's own `random.py` or `trees/` in the current folder is not
    taken for what we import (-P), as it is not by the command `gyre` either."""
    return [sys.executable, "-P", "-m", module, *arguments]


def stop(process: subprocess.Popen[bytes], grace: float) -> int:
    """End a spawned child and everything in its process group: TERM, `grace` seconds, KILL. Returns the exit status. Idempotent."""
    group = process.pid
    _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and (process.poll() is None or _group_alive(group)):
        time.sleep(_POLL)
    if process.poll() is None or _group_alive(group):
        _signal_group(group, signal.SIGKILL)
    return process.wait()


def marked(name: str, value: str) -> list[psutil.Process]:
    """Processes of ours, other than this one, whose environment holds `name=value`: finds also what was re-parented after a kill -9."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, a zombie, or somebody else's: not ours to stop
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process], grace: float) -> list[int]:
    """TERM, `grace` seconds, KILL, a second more. Returns the pids that are still there (uninterruptible or not ours)."""
    left = list(processes)
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        deadline = time.monotonic() + (grace if send is psutil.Process.terminate else 1.0)
        while (left := [p for p in left if _running(p)]) and time.monotonic() < deadline:
            time.sleep(_POLL)
    return [p.pid for p in left]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _forker() -> ThreadPoolExecutor:
    """One thread that lives until the process ends, for callers whose own thread may end before their child."""
    return ThreadPoolExecutor(1, thread_name_prefix="forker")


def _running(process: psutil.Process) -> bool:
    """Never by waiting for it: that would take the exit status from whoever holds its Popen."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_alive(group: int) -> bool:
    """Whether anything but zombies is left in the group (orphans may wait for a slow init to reap them)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False
