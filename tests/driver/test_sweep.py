"""Points of a grid, their results, and what Slurm is asked for."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_hpc.configfile import check
from gyre_hpc.driver import sweep
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.driver.submit import parameters
from gyre_hpc.errors import ConfigError
from gyre_hpc.events import EventLog


def plan(root: Path, grid: dict[str, list[Any]]) -> list[sweep.Point]:
    return sweep.plan(check({"run": {"dir": str(root), "name": "s"}, "sweep": {"grid": grid}}, "test"))


def test_every_combination_is_a_run_of_its_own(tmp_path: Path) -> None:
    points = plan(tmp_path, {"training.lr": [0.001, 0.01], "tasks.difficulty": [[1], [1, 2]]})
    assert [point.name for point in points] == [
        "lr=0.001,difficulty=1",
        "lr=0.001,difficulty=1-2",
        "lr=0.01,difficulty=1",
        "lr=0.01,difficulty=1-2",
    ]
    assert points[3].config.training.lr == 0.01
    assert points[3].config.tasks.difficulty == [1, 2]
    assert points[3].config.run.dir == tmp_path / "lr=0.01,difficulty=1-2"


def test_keys_with_the_same_last_part_keep_their_sections(tmp_path: Path) -> None:
    assert plan(tmp_path, {"run.seed": [1], "tasks.seed": [2]})[0].name == "run.seed=1,tasks.seed=2"


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({}, "empty"),
        ({"training.lr": []}, "empty"),
        ({"training.lrr": [1]}, r"unknown key training\.lrr.*did you mean training\.lr"),
        ({"training.lr": [-1]}, r"training\.lr = -1"),
        ({"training.lr.x": [1]}, "is not a section"),
        ({"training.lr": [0.1, 0.1]}, "twice"),
        ({"run.dir": ["a", "b"]}, r"has run\.dir; take it out"),
        ({"sweep.parallelism": [1, 2]}, r"has sweep\.parallelism; take it out"),
    ],
)
def test_a_bad_grid_is_one_line_before_anything_is_made(tmp_path: Path, grid: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path / "s", grid)
    assert not (tmp_path / "s").exists()


def test_points_must_fit_one_array(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different resources"):
        sweep.submit_points(plan(tmp_path / "s", {"cells.count": [2, 3]}))
    assert not (tmp_path / "s").exists()


def test_results_come_from_the_event_logs(tmp_path: Path) -> None:
    points = plan(tmp_path, {"training.lr": [0.001, 0.01, 0.1]})
    for point, status in ((points[0], "done"), (points[1], "stopped")):
        log = EventLog(prepare(point.config).events)
        log.emit("run.start")
        for step in range(1, 9):
            log.emit("step.end", step=step, score_mean=step / 10)
        log.emit("run.end", status=status)
    rows = sweep.results(points)
    assert [(row.status, row.steps, row.score_first, row.score_last) for row in rows] == [
        ("done", 8, 0.2, 0.6),
        ("stopped", 8, 0.2, 0.6),
        ("waiting", 0, None, None),
    ]
    assert sweep.exit_code(rows) == 75
    assert sweep.exit_code(rows[:1]) == 0
    EventLog(points[1].paths.events).emit("steps.again", step=3, newest=8)
    assert sweep.results(points)[1].steps == 3, "the weights of the others are given up"


def test_points_that_failed_in_an_earlier_array_are_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = plan(tmp_path, {"training.lr": [0.001]})
    log = EventLog(prepare(point.config).events)
    log.emit("run.start")
    log.emit("run.end", status="failed")
    told = iter([("run.start", {}), ("step.end", {"step": 1, "score_mean": 0.5}), ("run.end", {"status": "done"})])

    def time_passes(seconds: float) -> None:
        kind, fields = next(told)
        log.emit(kind, **fields)

    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=time.monotonic, sleep=time_passes))
    monkeypatch.setattr(sweep, "job_alive", lambda job: True)
    assert [(row.status, row.steps) for row in sweep.wait([point], "1")] == [("done", 1)]


def test_a_point_that_was_preempted_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = plan(tmp_path, {"training.lr": [0.001]})
    log = EventLog(prepare(point.config).events)
    seen: list[str] = []
    told = iter([("run.start", ""), ("run.end", "stopped"), ("run.start", ""), ("run.end", "done")])

    def time_passes(seconds: float) -> None:
        seen.append(sweep.results([point])[0].status)
        kind, status = next(told)
        log.emit(kind, **({"status": status} if status else {}))

    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=time.monotonic, sleep=time_passes))
    monkeypatch.setattr(sweep, "job_alive", lambda job: True)
    assert [row.status for row in sweep.wait([point], "1")] == ["done"]
    assert seen == ["waiting", "running", "stopped", "running"]


def test_each_way_to_end_is_told_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One failed, one was preempted, one killed, one never began, one was refused before its attempt, and the log of one is damaged."""
    points = plan(tmp_path, {"run.seed": [1, 2, 3, 4, 5, 6]})
    logs = [EventLog(prepare(point.config).events) for point in points]
    for log in logs[:3]:
        log.emit("run.start")
        log.emit("step.end", step=1, score_mean=0.5)
    logs[0].emit("failure", what="rank-00001: no memory", remedy="a smaller model")
    logs[0].emit("run.end", status="failed")
    logs[1].emit("run.end", status="stopped")
    logs[4].emit("failure", what="gateway.host = x does not resolve here", remedy="another")
    logs[5].path.write_text("no event\n")
    monkeypatch.setattr(sweep, "job_alive", lambda job: False)
    monkeypatch.setattr(sweep, "GRACE", -1.0)
    rows = sweep.wait(points, "1")
    assert [row.status for row in rows] == ["failed", "stopped", "lost", "not started", "failed", "failed"]
    assert [(row.steps, row.wanted) for row in rows[:2]] == [(1, 20), (1, 20)]
    assert sweep.exit_code(rows) == 1
    assert sweep.exit_code(rows[1:4]) == 75
    sweep.print_table(rows)
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("seed="))
    assert told["seed=1"] == "rank-00001: no memory; a smaller model"
    assert told["seed=2"].startswith("stopped before its last step; submit the sweep again")
    assert told["seed=3"].startswith("its job ended without a word")
    assert told["seed=4"].startswith("its job ended before the run began; see the log of its job")
    assert told["seed=5"] == "gateway.host = x does not resolve here; another"
    assert "is damaged at byte 0" in told["seed=6"]


def test_a_job_asks_for_one_node_more_than_its_cells_and_for_a_signal_to_the_driver_only() -> None:
    config = check(
        {"cells": {"count": 3, "nodes_per_cell": 2}, "slurm": {"partition": "p", "additional": {"requeue": False, "reservation": "r"}}}, "t"
    )
    asked = parameters(config, "x")
    assert (asked["nodes"], asked["ntasks_per_node"], asked["partition"], asked["use_srun"]) == (7, 1, "p", False)
    assert asked["additional_parameters"] == {"signal": "B:USR1@60", "requeue": False, "reservation": "r"}
    assert asked["setup"] == ["trap '' USR1 USR2"]
    assert "account" not in asked
