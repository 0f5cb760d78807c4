"""What grows in a soak: memory, descriptors, threads, sockets and files, looked at now and then (soak.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

_MODULES = {
    "gyre_hpc.engines.vllm_main": "engine",
    "benchmarks.soak_kv": "rank",
    "gyre_hpc.gateway.main": "gateway",
    "gyre_hpc.engines.torch_main": "engine",
    "gyre_hpc.controller.main": "rank",
    "gyre_hpc.executions.supervisor": "supervisor",
}


_MEMORY = 0
"""Its place among what a look tells of a process."""


@dataclass(frozen=True)
class Allowed:
    """How much more may be in use at the end than after the warm-up."""

    memory: int = 32 << 20
    descriptors: int = 24
    threads: int = 4
    sockets: int = 24
    files: int = 40


@dataclass(frozen=True)
class Sample:
    """One look. `processes`: name -> (bytes of its own memory, descriptors, threads, sockets); `files`: place -> (number, bytes)."""

    t: float
    transfers: int
    processes: dict[str, tuple[int, int, int, int]]
    files: dict[str, tuple[int, int]]


@dataclass
class Found:
    """What a soak showed. `problems`: one line each; none is the aim."""

    numbers: dict[str, Any] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)


def look(watched: Mapping[str, psutil.Process], places: Mapping[str, Path], transfers: int) -> Sample:
    """One look at these processes and folders. Raises psutil.NoSuchProcess for one that has ended."""
    processes = {}
    for name, process in watched.items():
        with process.oneshot():
            processes[name] = (
                process.memory_full_info().uss,
                process.num_fds(),
                process.num_threads(),
                len(process.net_connections("all")),
            )
    files = {name: _sizes(path) for name, path in places.items()}
    files["shared memory"] = _shared(watched)
    return Sample(time.monotonic(), transfers, processes, files)


def _usual(field: int, values: Sequence[int]) -> int:
    return min(values) if field == _MEMORY else int(median(values))


def grown(samples: Sequence[Sample], allowed: Allowed, found: Found) -> None:
    """What the last quarter of the looks has more than the second: the first is the warm-up.

    Of memory the least of a quarter, of the rest the median: what an engine holds of prefixes and slots comes and goes with the calls that
    it serves, and what is lost stays also when they are empty.
    """
    count = len(samples)
    if count < 8:
        found.problems.append(f"only {count} looks: nothing can be said of what grows")
        return
    early, late = samples[count // 4 : count // 2], samples[-(count // 4) :]
    for name in early[0].processes:
        before, after = [[_usual(i, [sample.processes[name][i] for sample in part]) for i in range(4)] for part in (early, late)]
        more = [b - a for a, b in zip(before, after, strict=True)]
        found.growth[name] = {
            "memory_mb": [round(before[0] / 2**20, 1), round(more[0] / 2**20, 2)],
            **{what: [before[i], more[i]] for i, what in enumerate(("descriptors", "threads", "sockets"), 1)},
        }
        limits = (allowed.memory, allowed.descriptors, allowed.threads, allowed.sockets)
        found.check(all(a <= b for a, b in zip(more, limits, strict=True)), f"{name} has grown: {found.growth[name]}")
    transfers = max(1, late[-1].transfers - early[0].transfers)
    for name in late[-1].files:
        numbers = [median(sample.files.get(name, (0, 0))[0] for sample in part) for part in (early, late)]
        size = [sample.files.get(name, (0, 0))[1] for sample in (early[0], late[-1])]
        found.growth[f"files: {name}"] = {
            "number": [numbers[0], numbers[1] - numbers[0]],
            "bytes": size,
            "bytes_a_transfer": round((size[1] - size[0]) / transfers),
        }
        found.check(numbers[1] - numbers[0] <= allowed.files, f"files of {name}: {numbers}")


def named_by(command: list[str]) -> str | None:
    """The kind of process of a run, by its command line; None for one that is not watched."""
    if command and command[0].startswith("VLLM::"):
        return command[0].split()[0].lower().replace("::", "-")
    if command[1:3] == ["-P", "-m"]:
        command = command[1:]
    return _MODULES.get(command[2]) if command[1:2] == ["-m"] and len(command) > 2 else None


def _sizes(path: Path) -> tuple[int, int]:
    """Files below `path`, and their bytes; what goes away meanwhile is not counted."""
    files = [path] if path.is_file() else [Path(folder) / name for folder, folders, names in os.walk(path) for name in (*folders, *names)]
    sizes = [size for size in map(_size, files) if size is not None]
    return len(sizes), sum(sizes)


def _size(file: Path) -> int | None:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return None


def _shared(watched: Mapping[str, psutil.Process]) -> tuple[int, int]:
    """Files of /dev/shm that one of the processes has mapped, and their bytes."""
    found: set[str] = set()
    for process in watched.values():
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()  # psutil reads smaps, which costs a hundred times as much
        except OSError:
            raise psutil.NoSuchProcess(process.pid) from None
        found.update(line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line)
    sizes = [size for size in (_size(Path("/dev/shm") / name) for name in found) if size is not None]
    return len(sizes), sum(sizes)
