"""Host memory that this process may still take: what the machine has free, and what every cgroup above us leaves of its limit.

Slurm (and any container) bounds a job by cgroups: a node with 500 GiB free kills who takes more than the job's 64. Invariant: the smallest
of all of them counts, from our own group up to the root of each hierarchy (v2, v1, or both as hybrid systems have them); a group without a
limit says nothing. What a group holds as file cache counts as free, as the kernel's own MemAvailable has it: it is given up on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_TABLE = Path("/proc/self/cgroup")
_CACHE = ("inactive_file", "active_file")
_V1_CACHE = ("total_inactive_file", "total_active_file")


def available() -> int:
    """Bytes. 0 where a limit is reached or passed."""
    return min((int(psutil.virtual_memory().available), *left_below_limits()))


def left_below_limits(table: Path = _TABLE, root: Path = _ROOT) -> list[int]:
    """Bytes that each group with a limit leaves. `table`: as /proc/self/cgroup; `root`: where the hierarchies are mounted."""
    try:
        lines = table.read_text().splitlines()
    except OSError:  # no cgroups in this kernel
        return []
    return [left for line in lines for left in _of(line, root)]


def _of(line: str, root: Path) -> Iterator[int]:
    """Of one line `number:controllers:group`; those without the memory controller have no such files."""
    _, controllers, own = line.split(":", 2)
    group = Path(own.lstrip("/"))
    groups = [group, *group.parents] if group != Path() else [group]
    if controllers == "":
        for mount in (root, root / "unified"):
            for each in groups:
                yield from _left(mount / each, ("memory.max", "memory.high"), "memory.current", _CACHE)
    elif "memory" in controllers.split(","):
        for each in groups:
            yield from _left(root / "memory" / each, ("memory.limit_in_bytes",), "memory.usage_in_bytes", _V1_CACHE)


def _left(folder: Path, limits: tuple[str, ...], usage: str, cache: tuple[str, ...]) -> Iterator[int]:
    bounds = [bound for bound in (_number(folder / name) for name in limits) if bound is not None]
    used = _number(folder / usage)
    if bounds and used is not None:
        yield max(0, min(bounds) - used + sum(_stat(folder / "memory.stat", name) for name in cache))


def _number(file: Path) -> int | None:
    """None: not there (the root has none), or `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, name: str) -> int:
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if row[:1] == [name]), 0)
