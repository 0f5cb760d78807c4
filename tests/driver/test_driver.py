"""The driver with small real programs: the end, a stop, a resume, and the death of every kind of process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gyre_hpc import processes
from gyre_hpc.configfile import check
from gyre_hpc.driver import attempt, children, disk
from gyre_hpc.driver.allocation import find_allocation
from gyre_hpc.driver.children import MARK
from gyre_hpc.driver.driver import drive
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.driver.world import WorldWatch
from gyre_hpc.errors import ConfigError, ExitCode, GyreError, Resumable
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from tests.driver.actors import hasten, programs

DEADLINES = {"start": 20, "stop": 3}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return prepare(
        check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 1}, "cells": {"count": 2}, "deadlines": DEADLINES}, "test")
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch.setattr)


def kinds(paths: RunPaths) -> list[str]:
    return [event["kind"] for event in read_events(paths.events)]


def left_behind(paths: RunPaths) -> list[psutil.Process]:
    return [p for attempt in range(1, 9) for p in processes.marked(MARK, str(paths.runtime(attempt)))]


def test_a_run_ends_with_its_steps_and_leaves_nothing(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(run.root, programs=programs(steps=3)) == ExitCode.DONE
    assert kinds(run) == ["run.start", *["step.end", "checkpoint"] * 3, "run.end"]
    assert left_behind(run) == []
    assert not run.lock.exists()
    assert not run.runtime(1).exists()
    assert sorted(p.name for p in run.attempt_logs(1).iterdir()) == sorted(
        ["driver.log", "gateway.log", "mpi.log", "model.log", f"supervisor-{find_allocation().nodes[0]}.log"]
    )
    assert "step 3, score 0.500" in capsys.readouterr().out


class Background:
    """The driver in a process of its own."""

    def __init__(self, run: RunPaths, steps: int = 1000) -> None:
        self.run = run
        argv = [sys.executable, "-m", "tests.driver.actors", "drive", str(run.root), str(steps)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def steps(self) -> int:
        return kinds(self.run).count("step.end")

    def end(self, seconds: float = 120.0) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out


@pytest.mark.job
def test_sigterm_stops_in_good_order_and_the_next_attempt_resumes(run: RunPaths) -> None:
    background = Background(run)
    background.until(lambda: background.steps() >= 2)
    with pytest.raises(GyreError, match=rf"pid {background.process.pid}"):
        drive(run.root, programs=programs())
    background.process.send_signal(signal.SIGTERM)
    code, out = background.end(60)
    assert (code, out.splitlines()[-1]) == (75, "stopped by SIGTERM; the same command resumes")
    assert left_behind(run) == []
    done = background.steps()
    assert drive(run.root, programs=programs(steps=done + 2)) == ExitCode.DONE
    events = list(read_events(run.events))
    assert [e["step"] for e in events if e["kind"] == "step.end"] == list(range(1, done + 3))
    assert [(e["attempt"], e["status"]) for e in events if e["kind"] == "run.end"] == [(1, "stopped"), (2, "done")]


@pytest.mark.job
def test_sigterm_to_the_ranks_alone_is_a_stop_as_well(run: RunPaths) -> None:
    """A scheduler that preempts sends it to every process of every step, and none to the batch script where the driver is."""
    background = Background(run)
    background.until(lambda: background.steps() >= 2)
    for name, pid in victims(run).items():
        if name.startswith("mpi."):
            os.kill(pid, signal.SIGTERM)
    code, out = background.end(60)
    assert (code, out.splitlines()[-1]) == (75, "stopped by SIGTERM; the same command resumes")
    assert left_behind(run) == []
    assert kinds(run)[-1] == "run.end"
    assert "failure" not in kinds(run)


@pytest.mark.job
def test_a_stop_while_the_ranks_start_does_not_wait_for_a_step(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUMBLES", "hang:9")
    background = Background(run)
    background.until(lambda: len(list(run.runtime(1).glob("ready-mpi.*"))) == 3, 60)
    background.process.send_signal(signal.SIGTERM)
    code, out = background.end(120)
    assert (code, out.splitlines()[-1]) == (75, "stopped by SIGTERM; the same command resumes")
    assert "for the controller to end its step" not in (run.attempt_logs(1) / "driver.log").read_text()
    assert left_behind(run) == []


def victims(paths: RunPaths) -> dict[str, int]:
    """Pids by name, from the start marks."""
    return {
        p.name.removeprefix("started-").removesuffix(".json"): json.loads(p.read_text())["pid"]
        for p in paths.runtime(1).glob("started-*.json")
    }


@pytest.mark.job
@pytest.mark.parametrize("victim", ["gateway", "mpi.0", "mpi.2"])
def test_kill_9_of_a_process_stops_the_run_resumable_with_one_line(run: RunPaths, victim: str) -> None:
    background = Background(run)
    background.until(lambda: background.steps() >= 1)
    pid = next(pid for name, pid in victims(run).items() if name.startswith(victim))
    os.kill(pid, signal.SIGKILL)
    code, out = background.end(120)
    assert code == 75
    line = out.splitlines()[-1]
    assert ("a rank of the MPI step" if victim.startswith("mpi") else victim) in line
    assert "killed by SIGKILL" in line
    assert "the same command resumes" in line
    assert left_behind(run) == []
    failures = [event for event in read_events(run.events) if event["kind"] == "failure"]
    assert [f["remedy"] for f in failures] == ["the same command resumes"]


@pytest.mark.job
def test_a_supervisor_that_is_killed_is_started_again_a_few_times(run: RunPaths) -> None:
    background = Background(run)

    def supervisors() -> list[int]:
        return [pid for name, pid in victims(run).items() if name.startswith("supervisor") and psutil.pid_exists(pid)]

    for tries in range(1, children.SUPERVISOR_TRIES + 2):
        background.until(lambda: background.steps() >= 1 and len(supervisors()) == 1)
        steps = background.steps()
        os.kill(supervisors()[0], signal.SIGKILL)
        if tries > children.SUPERVISOR_TRIES:
            break
        background.until(lambda n=tries: kinds(run).count("supervisor.again") == n)
        background.until(lambda s=steps: background.steps() > s)
    code, out = background.end(120)
    assert code == 75
    assert "supervisor" in out.splitlines()[-1]
    assert "was killed by SIGKILL" in out.splitlines()[-1]
    node = find_allocation().nodes[0]
    again = [event for event in read_events(run.events) if event["kind"] == "supervisor.again"]
    assert [(event["node"], event["lost"], event["tries"]) for event in again] == [
        (node, 2, n) for n in range(1, children.SUPERVISOR_TRIES + 1)
    ]
    assert (run.attempt_logs(1) / "gateway.log").read_text().count(f"asked: /control/nodes/{node}/gone") == children.SUPERVISOR_TRIES
    assert left_behind(run) == []


@pytest.mark.job
def test_kill_9_of_the_driver_leaves_nothing_and_its_lock_is_taken_over(run: RunPaths) -> None:
    background = Background(run)
    background.until(lambda: background.steps() >= 1)
    background.process.kill()
    background.end()
    end = time.monotonic() + 60
    while left_behind(run) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind(run) == []
    assert run.lock.exists()
    assert drive(run.root, programs=programs(steps=background.steps())) == ExitCode.DONE
    assert not run.runtime(1).parent.exists(), "secrets and marks of the killed driver's attempt"


def test_a_rank_that_ends_before_mpi_is_up_does_not_leave_the_others_waiting(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in MPI_Init then, and mpiexec with them."""
    monkeypatch.setattr(children, "SAID", 1.0)
    code = (
        "import os, sys, time; from pathlib import Path; from gyre_hpc.failure import *; from gyre_hpc.errors import *;"
        "os.environ['PMI_RANK'] == '0' or time.sleep(1000);"
        f"record_failure(Path(os.environ['{MARK}']), as_failure('controller', ConfigError('no such tasks', 'name others'))); os._exit(0)"
    )
    with pytest.raises(ConfigError, match="controller: no such tasks; name others"):  # and not that a start took too long
        drive(run.root, programs=programs(mpi=[sys.executable, "-c", code]))
    assert left_behind(run) == []


def test_a_process_that_says_why_it_dies_is_quoted(run: RunPaths) -> None:
    code = (
        "import os; from pathlib import Path; from gyre_hpc.failure import *; from gyre_hpc.errors import *;"
        f"record_failure(Path(os.environ['{MARK}']), as_failure('gateway', ConfigError('no such port', 'choose another'))); os._exit(2)"
    )
    with pytest.raises(GyreError, match="gateway: no such port; choose another") as caught:
        drive(run.root, programs=programs(gateway=[sys.executable, "-c", code]))
    assert caught.value.exit_code != ExitCode.RESUMABLE
    assert [e["status"] for e in read_events(run.events) if e["kind"] == "run.end"] == ["failed"]


def test_a_gateway_that_never_listens_runs_into_the_start_deadline(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    config = check(
        {"run": {"dir": str(run.root), "name": "t", "min_free_mb": 1}, "cells": {"count": 2}, "deadlines": {"start": 0.5}}, "test"
    )
    prepare(config)
    with pytest.raises(Resumable, match="waited 0 s for the gateway to listen"):
        drive(run.root, programs=programs(gateway=["sleep", "60"]))
    assert left_behind(run) == []


@pytest.mark.job
def test_a_stubborn_process_is_killed(run: RunPaths) -> None:
    stubborn = ["bash", "-c", "trap '' TERM; while :; do sleep 1; done"]
    assert drive(run.root, programs=programs(steps=1, supervisor=stubborn)) == ExitCode.DONE
    assert f"killed after 3 s: supervisor-{find_allocation().nodes[0]}" in (run.attempt_logs(1) / "driver.log").read_text()
    assert left_behind(run) == []


def test_too_little_space_is_refused_before_anything_starts(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_mb", lambda folder: 0)
    with pytest.raises(Resumable, match="0 MiB free"):
        drive(run.root, programs=programs())
    assert not run.logs.exists()


def test_a_disk_that_fills_stops_the_run(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([100, 100])
    monkeypatch.setattr(disk, "free_mb", lambda folder: next(free, 0))
    monkeypatch.setattr(attempt, "DISK_POLL", 0.2)
    with pytest.raises(Resumable, match="nearly full"):
        drive(run.root, programs=programs(steps=1000))
    assert left_behind(run) == []


def test_a_model_path_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    paths = prepare(
        check({"run": {"dir": str(tmp_path / "run"), "name": "t", "min_free_mb": 1}, "model": {"path": str(tmp_path / "nope")}}, "test")
    )
    with pytest.raises(ConfigError, match="does not exist"):
        drive(paths.root, programs=programs())


@pytest.mark.job
@pytest.mark.parametrize("how", ["abort", "hang"])
def test_ranks_that_fail_in_mpi_init_are_started_again(run: RunPaths, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUMBLES", f"{how}:2")
    monkeypatch.setattr(attempt, "WorldWatch", lambda folder, ranks, limit: WorldWatch(folder, ranks, 3.0 if how == "hang" else 60.0))
    monkeypatch.setattr(WorldWatch, "late", lambda watch, now: None)  # imports may take longer than that
    assert drive(run.root, programs=programs(steps=2)) == ExitCode.DONE
    assert kinds(run) == ["run.start", "mpi.again", "mpi.again", *["step.end", "checkpoint"] * 2, "run.end"]
    assert left_behind(run) == []


@pytest.mark.job
def test_a_rank_that_never_comes_as_far_as_mpi_init_ends_the_attempt_by_name(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUMBLES", "late:9")
    monkeypatch.setattr(attempt, "WorldWatch", lambda folder, ranks, limit: WorldWatch(folder, ranks, 10.0))
    with pytest.raises(Resumable, match=r"waited 10 s for rank 1 to be ready for MPI_Init; see mpi\.log"):
        drive(run.root, programs=programs(steps=2))
    assert kinds(run) == ["run.start", "failure", "run.end"]
    assert left_behind(run) == []


@pytest.mark.job
def test_ranks_that_never_get_through_mpi_init_end_the_attempt_by_name(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUMBLES", "abort:9")
    with pytest.raises(Resumable, match=r"MPI did not start: the step ended with status -9, 3 times; log: .*mpi\.log"):
        drive(run.root, programs=programs(steps=2))
    assert kinds(run) == ["run.start", "mpi.again", "mpi.again", "failure", "run.end"]
    assert left_behind(run) == []
