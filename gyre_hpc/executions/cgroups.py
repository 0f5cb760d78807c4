"""A cgroup per box that bounds its number of processes, for root (whom the kernel exempts from RLIMIT_NPROC).

Invariants: groups are made below a group that we may write, below our own one whenever we run inside a Slurm job, so that no process
escapes what the site imposed; a group's name holds the pid of its maker, so that the leftovers of a killed one can be told and removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "gyre-box-"


@dataclass(frozen=True)
class Group:
    """One box's group."""

    path: Path

    def enter(self) -> list[str]:
        """A command prefix: a shell that moves itself in and becomes the rest of the command line."""
        return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.path / "cgroup.procs")]

    def remove(self) -> None:
        """Remove the group; processes are gone by then. What the kernel still holds busy is swept by `tidy`, or by the next `find`."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


@dataclass(frozen=True)
class Parent:
    """A group that takes children with the pids controller. `kind`: v1 or v2."""

    path: Path
    kind: str
    _numbers: itertools.count[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def create(self, processes: int) -> Group:
        """A new group for at most `processes` processes. Raises OSError."""
        path = self.path / f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        path.mkdir()
        (path / "pids.max").write_text(f"{processes}\n")
        return Group(path)

    def tidy(self, seconds: float = 0.5) -> None:
        """Remove the groups of this process that were busy a moment ago, at most for `seconds`."""
        end = time.monotonic() + seconds
        while (left := list(self.path.glob(f"{_PREFIX}{os.getpid()}-*"))) and time.monotonic() < end:
            for path in left:
                Group(path).remove()
            time.sleep(0.02)


def find() -> Parent | None:
    """A group that works, or None: v2 first, then v1. Only root looks, a plain user's rlimit is enough."""
    if os.geteuid() != 0:
        return None
    for parent in _candidates(Path("/proc/self/cgroup").read_text()):
        if _works(parent):
            _sweep(parent)
            return parent
    return None


def _candidates(table: str) -> list[Parent]:
    """Our own group in each hierarchy, then (outside Slurm jobs only) those above it. `table`: text of /proc/self/cgroup."""
    found = []
    for line in table.splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            roots, kind = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")], "v2"
        elif "pids" in controllers.split(","):
            roots, kind = [Path("/sys/fs/cgroup") / controllers], "v1"
        else:
            continue
        inside = Path(own.lstrip("/"))
        folders = [inside] if "SLURM_JOB_ID" in os.environ else [inside, *inside.parents]
        found += [Parent(root / folder, kind) for root in roots for folder in folders]
    return sorted(found, key=lambda parent: parent.kind == "v1")


def _works(parent: Parent) -> bool:
    if not (parent.path / "cgroup.procs").exists():
        return False
    path = parent.path / f"{_PREFIX}{os.getpid()}-probe"
    try:
        path.mkdir()
    except OSError:
        return False
    try:
        with open(path / "pids.max", "r+") as limit:
            limit.write("8\n")
    except OSError:
        return False
    finally:
        path.rmdir()
    return True


def _sweep(parent: Parent) -> None:
    for path in parent.path.glob(f"{_PREFIX}*"):
        maker = path.name.removeprefix(_PREFIX).split("-")[0]
        if not Path(f"/proc/{maker}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()
