"""What a cell's own world says of a rank that is gone. With ranks: tests/training/test_sharded.py, tests/job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.cellworld import CellWorld
from gyre_hpc.controller.place import Place
from gyre_hpc.errors import GyreError, PeerLost
from gyre_hpc.failure import as_failure, first_failure, record_failure


class Meetings:
    """In place of a communicator: barriers that are over at once, in what order they came."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def Ibarrier(self) -> Any:  # MPI's own name
        self.seen.append("barrier")
        return SimpleNamespace(Test=lambda: True)


def world(shards: bool) -> tuple[CellWorld, list[str]]:
    comm = Meetings()

    @contextlib.contextmanager
    def watch(name: str, seconds: float) -> Iterator[None]:
        comm.seen.append(f"{name} {seconds:g}")
        yield

    return CellWorld(cast(Any, comm), Place(0, 1, 2), DeadlinesSection(), watch, shards), comm.seen


def test_ranks_meet_before_they_wait_where_nothing_serves_mpi() -> None:
    sharded, seen = world(shards=True)
    with sharded.together("a", 3.0):
        assert seen == ["barrier", "a 3"]
    with sharded.computing("b", 4.0):
        assert seen[2:] == ["b 4"]
    whole, seen = world(shards=False)
    with whole.together("a", 3.0), whole.computing("b", 4.0):
        assert seen == []


def test_a_rank_that_is_gone_is_a_consequence_and_never_the_cause(tmp_path: Path) -> None:
    sharded, _ = world(shards=True)
    with (
        pytest.raises(PeerLost, match=r"another rank of the cell is gone: .*closed by peer; see mpi\.log") as caught,
        sharded.together("a", 1.0),
    ):
        raise RuntimeError("[../third_party/gloo/pair.cc:1] Connection closed by peer\nstack")
    record_failure(tmp_path, as_failure("rank-00001", caught.value))
    alone = first_failure(tmp_path)
    assert alone is not None
    assert (alone.exit_code, alone.what) == (75, caught.value.what)
    record_failure(tmp_path, as_failure("rank-00002", GyreError("its disk is full")))
    first = first_failure(tmp_path)
    assert first is not None
    assert first.what == "its disk is full"
    with pytest.raises(RuntimeError, match="shapes differ"), sharded.together("a", 1.0):
        raise RuntimeError("shapes differ")
