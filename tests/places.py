"""Which tests run beside one another, and which have the machine to themselves; `./test` runs the parts one after the other.

- beside: most, file by file on several workers (pytest-xdist). Half of it waits: for Slurm, for processes that end, for clients.
- paired: whole jobs (tests/job) and servers of vLLM, two at a time. Each has several processes at work and could do with all cores of a
  small machine, but a part of its time it waits: for tools, for Slurm, for one process of many that starts or ends. Files that start vLLM
  never run beside one another: its servers take gigabytes.
- alone: what compares how much memory is in use at two times, which must not hang on how fast others let it go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

PLACES = ("beside", "paired", "alone")
_TESTS = Path(__file__).parent
_JOBS = _TESTS / "job"
_MEASURES = {_JOBS / "test_soak.py"}
_SERVERS = {"server", "servers", "pair"}
"""Fixtures of tests of vLLM that start it; others call its library."""
_SLOW = ("slurm", "job", "harness")
"""Marks of files that take long, the longest first."""
_VLLM = "vllm"
_LONG = (_VLLM, "test_slurm.py", "test_kills.py", "test_modes.py", "test_transfer_kills.py", "test_resume.py")
"""Groups of paired tests that take long, the longest first."""


def place(item: pytest.Item) -> str:
    """Of one test: one of PLACES."""
    if item.path in _MEASURES:
        return "alone"
    starts_vllm = item.get_closest_marker("vllm") and _SERVERS & set(getattr(item, "fixturenames", ()))
    return "paired" if starts_vllm or item.path.is_relative_to(_JOBS) else "beside"


def may_have(path: Path, wanted: str) -> bool:
    """Whether a file can have tests of this place: those that can't need not be compiled and imported."""
    if path in _MEASURES or wanted == "alone":
        return path in _MEASURES and wanted == "alone"
    if path.is_relative_to(_JOBS):
        return wanted == "paired"
    return wanted == "beside" or _on_vllm(path)


def group(path: Path) -> str:
    """Of a file of paired tests: those of a group run one after the other."""
    return _VLLM if _on_vllm(path) else path.name


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files whose tests take long come first, so that no worker begins one when the others are done; within a file nothing changes."""
    weight: dict[Path, int] = {}
    for item in items:
        own = min((number for number, mark in enumerate(_SLOW) if item.get_closest_marker(mark)), default=len(_SLOW))
        weight[item.path] = min(own, weight.get(item.path, own))
    return sorted(items, key=lambda item: weight[item.path])


def longest_groups_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same of those that are paired; a group's tests are together."""
    order = {name: number for number, name in enumerate(_LONG)}
    return sorted(items, key=lambda item: order.get(group(item.path), len(order)))


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist gives a worker one group at a time. Its own groups by mark (3.8) are without effect under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group(_TESTS.parent / nodeid.partition("::")[0])


def _on_vllm(path: Path) -> bool:
    return "mark.vllm" in path.read_text()
