"""What a rank of the core does when another one never comes. Whole checkpoints of several ranks: tests/job/test_wide.py."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from cells.waiting import DeadlineExceeded
from gyre_hpc.checkpoint import RunState
from gyre_hpc.controller.saving import save
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths


class FakeComm:
    """MPI whose other rank comes to so many barriers and then hangs."""

    def __init__(self, comes: int) -> None:
        self.comes = comes

    def Get_rank(self) -> int:
        return 1

    def bcast(self, value: object, root: int) -> object:
        return Path("/nowhere")

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
        save(FakeComm(comes), RunPaths(tmp_path), 2, FakeCore(), RunState(1, 1, {}), 0.05)  # type: ignore[arg-type]
