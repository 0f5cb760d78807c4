"""Children that are started again must come up; who dies, and what becomes of the run then: test_driver.py, with real programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gyre_hpc.driver import children as children_module
from gyre_hpc.driver.children import Children
from gyre_hpc.driver.launcher import Child, LocalLauncher
from gyre_hpc.driver.world import WorldWatch, mark_ready
from gyre_hpc.errors import Resumable
from gyre_hpc.events import EventLog


def test_what_is_started_again_must_start_within_its_deadline(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        watch = WorldWatch(tmp_path, 1, 20.0)
        children = Children(tmp_path, LocalLauncher(), EventLog(tmp_path / "events.jsonl"), 1, watch, 20.0, lambda: None)
        children.add_again(Child("supervisor-n1", process, tmp_path / "log", 1))
        assert children.check() is False
        child, _ = children._awaited[0]
        children._awaited = [(child, 0.0)]
        with pytest.raises(Resumable, match=r"waited 20 s for supervisor-n1 to start again"):
            children.check()
        (tmp_path / "started-supervisor-n1.json").write_text('{"pid": 1, "node": "n1", "rank": null}')
        assert children.check() is False
        assert children._awaited == []
    finally:
        process.kill()
        process.wait()


def test_ranks_that_never_come_as_far_as_mpi_end_the_attempt(tmp_path: Path) -> None:
    watch = WorldWatch(tmp_path, 2, 0.0)
    children = Children(tmp_path, LocalLauncher(), EventLog(tmp_path / "events.jsonl"), 1, watch, 20.0, lambda: None)
    for rank in range(2):
        (tmp_path / f"started-mpi.{rank}.json").touch()
    mark_ready(tmp_path, 0)
    assert children.check() is False, "its clock begins"
    with pytest.raises(Resumable, match=r"rank 1 to be ready for MPI_Init; see mpi\.log .*; the same command resumes"):
        children.check()


def test_a_gateway_that_dies_beside_a_supervisor_is_what_ended_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "SETTLE", 0.3)
    sleeping = {name: subprocess.Popen(["sleep", "1000"]) for name in ("gateway", "supervisor-n1")}
    try:
        # it dies while the driver waits for what belongs to the supervisor's death
        watch = WorldWatch(tmp_path, 1, 20.0)
        log = EventLog(tmp_path / "events.jsonl")
        children = Children(tmp_path, LocalLauncher(), log, 1, watch, 20.0, sleeping["gateway"].kill)
        for name, process in sleeping.items():
            children.add(Child(name, process, tmp_path / f"{name}.log", 1))
        assert children.check() is False
        sleeping["supervisor-n1"].kill()
        sleeping["supervisor-n1"].wait()
        with pytest.raises(Resumable, match=r"^gateway was killed by SIGKILL; log: .*gateway\.log"):
            children.check()
    finally:
        for process in sleeping.values():
            process.kill()
            process.wait()
