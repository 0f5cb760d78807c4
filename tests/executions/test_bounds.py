"""Limits of boxes against the node's own."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from gyre_hpc.config import HarnessSection
from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.bounds import check_bounds, within

GIB = 1 << 30


def hard(**limits: int) -> Callable[[int], tuple[int, int]]:
    """A node with these hard limits and no others."""
    known = {getattr(resource, f"RLIMIT_{name}"): value for name, value in limits.items()}
    return lambda kind: (0, known.get(kind, resource.RLIM_INFINITY))


def test_the_defaults_fit_a_node_without_limits_and_one_with_just_as_much() -> None:
    check_bounds(HarnessSection(), hard())
    check_bounds(HarnessSection(), hard(NPROC=128, AS=4 * GIB, FSIZE=64 << 20))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"NPROC": 100}, r"harness\.processes = 128 is above this node's own limit; at most 100 here, .*ulimit -Hu"),
        ({"AS": GIB}, r"harness\.memory_mb = 4096 is above .*; at most 1024 here, .*ulimit -Hv"),
        ({"FSIZE": 1 << 20}, r"harness\.disk_mb = 64 is above .*; at most 1 here, .*ulimit -Hf"),
    ],
)
def test_what_no_box_could_have_is_one_line(limits: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_bounds(HarnessSection(), hard(**limits))


def test_real_clients_are_bound_by_what_they_write_to_not_by_what_they_reserve() -> None:
    client = HarnessSection(kind="codex", path="/opt/codex")
    check_bounds(client, hard(AS=GIB))
    with pytest.raises(ConfigError, match=r"harness\.memory_mb = 4096 .*ulimit -Hd"):
        check_bounds(client, hard(DATA=GIB))


def test_what_we_chose_ourselves_follows_the_node() -> None:
    assert within(3600, resource.RLIMIT_CPU, hard(CPU=600)) == 600
    assert within(3600, resource.RLIMIT_CPU, hard(CPU=9000)) == 3600
    assert within(3600, resource.RLIMIT_CPU, hard()) == 3600
