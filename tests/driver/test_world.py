"""The watch over MPI's start: what counts as a failed start, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.driver.world import DEFAULTS, TRIES, WorldWatch, mark_busy, mark_ready, mark_through, settings


def test_the_clock_runs_from_the_last_rank_that_is_ready_until_all_are_through(tmp_path: Path) -> None:
    watch = WorldWatch(tmp_path, 2, limit=10.0)
    mark_ready(tmp_path, 1)
    assert not watch.starting()
    assert not watch.hangs(100.0), "rank 0 still tries tasks"
    mark_ready(tmp_path, 0)
    assert watch.starting()
    assert not watch.hangs(200.0)
    mark_through(tmp_path, 0)
    assert not watch.hangs(210.0)
    assert watch.hangs(210.1)
    mark_through(tmp_path, 1)
    assert watch.up()
    assert not watch.starting()
    assert not watch.hangs(1000.0)


def test_a_rank_that_never_comes_as_far_as_mpi_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = WorldWatch(tmp_path, 3, limit=10.0)
    mark_ready(tmp_path, 1)
    (tmp_path / "started-mpi.0.json").touch()
    assert watch.late(1000.0) is None, "the processes are not all there: that wait has another name"
    for rank in (1, 2):
        (tmp_path / f"started-mpi.{rank}.json").touch()
    assert watch.late(1000.0) is None
    assert watch.late(1010.0) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"still waiting for rank {rank} to be ready for MPI_Init after 10 s (deadline 10 s)" for rank in (0, 2)
    ]
    assert watch.late(1010.1) == "waited 10 s for rank 0 and 1 more to be ready for MPI_Init"
    mark_ready(tmp_path, 0)
    assert watch.late(1011.0) == "waited 10 s for rank 2 to be ready for MPI_Init"
    mark_ready(tmp_path, 2)
    assert watch.late(1012.0) is None
    assert not watch.hangs(1012.0)
    assert watch.late(2000.0) is None, "from here on it is MPI's start"


def test_the_rank_that_tries_tasks_has_the_time_that_each_of_them_may_take(tmp_path: Path) -> None:
    watch = WorldWatch(tmp_path, 1, limit=10.0)
    (tmp_path / "started-mpi.0.json").touch()
    mark_busy(tmp_path, 0, "task one", 100.0)
    assert watch.late(0.0) is None
    assert watch.late(110.0) is None
    mark_busy(tmp_path, 0, "task two", 50.0)
    assert watch.late(110.5) is None
    assert watch.late(170.5) is None
    assert watch.late(170.6) == "waited 60 s for rank 0 (task two) to be ready for MPI_Init"
    assert watch.again()
    assert watch.late(1000.0) is None


def test_another_try_begins_without_the_marks_of_the_last_one_and_their_number_is_bounded(tmp_path: Path) -> None:
    watch = WorldWatch(tmp_path, 1, limit=1.0)
    for _ in range(1, TRIES):
        mark_ready(tmp_path, 0)
        (tmp_path / "started-mpi.0.json").touch()
        (tmp_path / "started-gateway.json").touch()
        assert not watch.hangs(0.0)
        assert watch.hangs(1.1)
        assert watch.again()
        assert [path.name for path in tmp_path.iterdir()] == ["started-gateway.json"]
        assert not watch.starting()
    assert not watch.again()


def test_a_persons_own_settings_of_the_mpi_library_reach_the_step_and_beat_ours() -> None:
    assert settings({"PMI_RANK": "0", "PATH": "/bin"}) == DEFAULTS
    chosen = {"MPIR_CVAR_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1"}
    assert settings(chosen) == chosen
