"""What a rank of the core does when another one never comes. Whole checkpoints of several ranks: tests/job/test_wide.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from cells.waiting import DeadlineExceeded
from gyre_hpc.checkpoint import CoreState, RunState, latest
from gyre_hpc.checkpoint_writer import write_core
from gyre_hpc.controller.saving import Limits, save
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths
from tests.test_checkpoint import core_state


class FakeComm:
    """MPI whose other rank comes to so many barriers and then hangs."""

    def __init__(self, comes: int) -> None:
        self.comes = comes

    def Get_rank(self) -> int:
        return 1

    def bcast(self, value: object, root: int) -> object:
        return Path("/nowhere")

    def allgather(self, value: object) -> list[object]:
        return [value]

    def Ibarrier(self) -> FakeComm:
        self.comes -= 1
        return self

    def Test(self) -> bool:
        return self.comes >= 0


class FakeCore:
    """One whose shard can't be written: it takes part all the same."""

    def state(self) -> NoReturn:
        raise GyreError("the disk is full", "make room")


@pytest.mark.parametrize(("comes", "name"), [(0, "to begin the checkpoint"), (1, "to write their shards")])
def test_nobody_waits_for_ever_for_a_rank_that_hangs(comes: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=name):
        save(FakeComm(comes), RunPaths(tmp_path), 2, FakeCore(), RunState(1, 1, {}), Limits(0.05))  # type: ignore[arg-type]


class FakeLeader:
    """MPI of a core of two ranks, whose second one writes its shard between the barriers, or is slow with it."""

    def __init__(self, folder: Path, second: CoreState, looks: int = 1) -> None:
        self._folder, self._second, self._looks, self._barriers = folder, second, looks, 0

    def Get_rank(self) -> int:
        return 0

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def allgather(self, mine: Any) -> list[Any]:
        return [
            mine,
            self._second.bytes if isinstance(mine, int) else write_core(self._folder / "checkpoints/step-000002.partial", self._second),
        ]

    def Ibarrier(self) -> FakeLeader:
        self._barriers += 1
        return self

    def Test(self) -> bool:
        self._looks -= self._barriers > 1
        return self._looks <= 0 or self._barriers == 1


class WholeCore:
    def state(self) -> CoreState:
        return core_state(0, 2, 100)


def test_the_deadline_of_writing_grows_with_the_largest_shard_and_is_told(tmp_path: Path) -> None:
    told: list[float] = []
    large = core_state(1, 2, 50_000)
    comm: Any = FakeLeader(tmp_path, large, looks=3)
    saved = save(comm, RunPaths(tmp_path), 2, WholeCore(), RunState(2, 2, {}), Limits(1e-9, 1e-3, told.append))  # type: ignore[arg-type]
    assert told == [large.bytes / 1000], "KB/s"
    found = latest(RunPaths(tmp_path))
    assert found is not None
    assert saved["bytes"] == found.bytes
    assert found.identity() == WholeCore().state().identity, "a look at the small file tells what it fits"
    with pytest.raises(DeadlineExceeded, match="to write their shards"):
        save(FakeLeader(tmp_path, large, 10**9), RunPaths(tmp_path), 2, WholeCore(), RunState(2, 2, {}), Limits(1e-9, 1e6))  # type: ignore[arg-type]
