"""Which tests run beside one another, and which have the machine to themselves; `./test` runs the two parts one after the other.

- alone: whole jobs (tests/job) and servers of vLLM. Each of them keeps all cores of a small machine busy by itself.
- beside: everything else, file by file on several workers (pytest-xdist). Half of it waits: for Slurm, for processes that end, for clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

PLACES = ("beside", "alone")
_JOBS = Path(__file__).parent / "job"
_SERVERS = {"server", "servers", "pair"}
"""Fixtures of tests of vLLM that start it; others call its library."""
_SLOW = ("slurm", "job", "harness")
"""Marks of files that take long, the longest first."""


def place(item: pytest.Item) -> str:
    """Of one test: one of PLACES."""
    starts_vllm = item.get_closest_marker("vllm") and _SERVERS & set(getattr(item, "fixturenames", ()))
    return "alone" if starts_vllm or item.path.is_relative_to(_JOBS) else "beside"


def may_have(path: Path, wanted: str) -> bool:
    """Whether a file can have tests of this place: those that can't need not be compiled and imported."""
    if path.is_relative_to(_JOBS):
        return wanted == "alone"
    return wanted == "beside" or "mark.vllm" in path.read_text()


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files whose tests take long come first, so that no worker begins one when the others are done; within a file nothing changes."""
    weight: dict[Path, int] = {}
    for item in items:
        own = min((number for number, mark in enumerate(_SLOW) if item.get_closest_marker(mark)), default=len(_SLOW))
        weight[item.path] = min(own, weight.get(item.path, own))
    return sorted(items, key=lambda item: weight[item.path])
