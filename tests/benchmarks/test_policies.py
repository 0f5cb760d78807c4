"""benchmarks/policies.py apart from its runs: what is measured of a run, and the configurations of the runs."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import policies, policies_job, policies_plan, policies_rows
from benchmarks.policies_measure import measure
from benchmarks.policies_plan import SCHEDULES, Task, plan, write_config
from benchmarks.policies_table import draw_pictures, render, render_rows
from gyre_hpc.configfile import check, dump, load
from gyre_hpc.errors import GyreError
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.actor import Satellite
from gyre_hpc.training.loss import Sums


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An async run of two steps on two cells, one of which trains; the clock begins at 100."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    config = {
        "run": {"name": "run", "steps": 2},
        "cells": {"count": 2},
        "rollout": {"capacity": 2},
        "harness": {"slots_per_node": 1},
        "schedule": {"groups_per_step": 1, "group_size": 2, "phi": 0, "mu": 1, "mode": "async", "trainers": 1},
    }
    dump(check(config, "test"), paths.config)
    step = {"kind": "step.end", "close_seconds": 0.0, "microsteps": 4, "score_mean": 0.5, "cells": 1}
    ended = {"kind": "execution.end", "reason": "finished", "score": 1.0}
    events = [
        {"t": 90.0, "kind": "run.start", "attempt": 1, "nodes": ["a", "b"], "cells": [["a"], ["b"]]},
        {"t": 99.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 1.0},
        {"t": 104.0, **ended, "group": 0, "index": 0, "seconds": 4.0},
        {"t": 108.0, **ended, "group": 0, "index": 1, "seconds": 8.0},
        {"t": 112.0, **step, "step": 1, "groups": [0], "train_seconds": 4.0, "staleness_mean": 0.0},
        {"t": 112.0, "kind": "publish", "version": 1, "seconds": 0.0},
        {"t": 116.0, **ended, "group": 1, "index": 0, "seconds": 4.0},
        {"t": 116.0, **ended, "group": 1, "index": 1, "seconds": 4.0},
        {"t": 120.0, **step, "step": 2, "groups": [1], "train_seconds": 4.0, "staleness_mean": 1.0},
        {"t": 121.0, "kind": "run.end", "status": "done"},
    ]
    paths.events.write_text("".join(json.dumps({"seq": seq, **event}) + "\n" for seq, event in enumerate(events)))
    return paths.root


def test_wall_idle_and_prediction_of_a_run(run: Path) -> None:
    found = measure(run)
    assert (found.wall, found.simulated, found.error) == (20.0, 20.0, 0.0)
    assert found.staleness == 0.5
    # the trainer computes 8 of 20 seconds; of the other's two places 4 + 8 + 4 + 4 of 40 are in use
    assert list(found.idle_cells) == pytest.approx([0.6, 0.5])
    assert found.outcome.idle == pytest.approx(1 - (8 + 10) / 40, abs=0.03)  # which also counts the second before the dispatch
    text = render({("elastic", 0): found}, {("elastic", 0): 0.7}, {("elastic", 0): 21.0}, 0.35)
    assert "emulated device time: 0.35 s" in text
    assert "1.00 (1.00 to 1.00); 1.00; 1.00" in text


def test_a_run_that_is_not_over_is_no_measurement(run: Path) -> None:
    paths = RunPaths(run)
    lines = paths.events.read_text().splitlines()
    paths.events.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(GyreError, match="not a run of one attempt that is done"):
        measure(run)


def test_a_run_that_is_done_at_the_second_try_counts_and_the_others_are_made_in_any_case(run: Path, tmp_path: Path) -> None:
    """Of three, one is a run of two attempts at first, and one fails whenever it is made."""
    whole = RunPaths(run).events.read_text()
    again = {"t": 113.0, "kind": "run.start", "attempt": 2, "nodes": ["a", "b"], "cells": [["a"], ["b"]]}
    lines = whole.splitlines()
    twice = "\n".join([*lines[:6], json.dumps({"seq": 6, **again}), *lines[6:]]) + "\n"
    names = list(SCHEDULES)[:3]
    tasks = plan(names, SCHEDULES, 1, tmp_path)
    made: list[str] = []

    def make(task: Task) -> None:
        first = task.name not in made
        made.append(task.name)
        if task.name == names[2]:
            raise GyreError("it failed", "read its log")
        shutil.copytree(run, task.run, dirs_exist_ok=True)
        RunPaths(task.run).events.write_text(twice if first and task.name == names[0] else whole)

    with ThreadPoolExecutor(2) as pool:
        failed = policies._run_some(tasks, 2, pool, make, lambda start, end: end - start)
        assert {task.name: error.what.endswith("of one attempt that is done (done)") for task, error in failed.items()} == {
            names[0]: True,
            names[2]: False,
        }
        left = policies._run_some(list(failed), 2, pool, make, lambda start, end: end - start)
    assert [task.name for task in left] == [names[2]]
    assert [task.name for task in tasks if task.cores.exists()] == names[:2]
    assert json.loads(tasks[0].cores.read_text()) == 20.0


def test_runs_of_a_seed_differ_in_their_schedule_alone(tmp_path: Path) -> None:
    tasks = plan(list(SCHEDULES), SCHEDULES, 2, tmp_path)
    assert [task.seed for task in tasks].count(1) == len(SCHEDULES) - 1
    configs = [load(write_config(task, policies_plan.JOB, 12)) for task in tasks]
    for config in configs:
        schedule = config.schedule
        assert schedule.phi + (schedule.mu - 1) / 2 == 1.5
        serving = config.cells.count - (schedule.trainers or 0)
        assert config.harness.slots_per_node * config.cells.count == serving * config.rollout.capacity
    same = [config.model_copy(update=dict.fromkeys(("run", "schedule", "harness", "tasks"))) for config in configs]
    assert all(config == same[0] for config in same)
    harnesses = [config.harness.model_copy(update={"slots_per_node": 1}) for config in configs]
    assert all(harness == harnesses[0] for harness in harnesses)
    assert Task("elastic", SCHEDULES["elastic"], 1, tmp_path).run.name == "elastic-seed1"


def test_emulated_device_time_counts_the_real_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(Satellite, "accumulate", lambda self, rows: Sums())
    monkeypatch.setattr(policies_job, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    policies_job.emulate_device(0.5)
    assert Satellite.accumulate(object(), [None, None]) == Sums()  # type: ignore[arg-type,list-item]
    assert 0.9 < slept[0] <= 1.0


def test_the_papers_rows_keep_their_schedules_on_a_quarter_of_the_nodes(tmp_path: Path) -> None:
    rows = policies_rows.rows()
    assert list(rows) == ["A0", "A3", "C0", "C1", "C2", "E0", "E1", "E2"]
    for name, task in zip(rows, plan(list(rows), rows, 1, tmp_path), strict=True):
        small, paper = load(write_config(task, policies_rows.JOB, 6)), load(policies_rows.PAPER / f"{name}.yaml")
        for key in ("mode", "streaming", "phi", "mu", "trainers", "join_late"):
            assert getattr(small.schedule, key) == getattr(paper.schedule, key), (name, key)
        assert rows[name].nodes == 8
        assert small.harness.slots_per_node * 8 == rows[name].serving * small.rollout.capacity
    assert (rows["E2"].cells, rows["E2"].nodes_per_cell, rows["C1"].cells, rows["C1"].standalone) == (4, 2, 7, 1)
    assert (rows["A0"].cells, rows["A0"].standalone, rows["A0"].serving) == (4, 4, 4)


def test_standalone_nodes_count_as_nodes_and_are_drawn(run: Path, tmp_path: Path) -> None:
    paths = RunPaths(run)
    config = load(paths.config)
    cells, schedule = config.cells, config.schedule
    cells, schedule = cells.model_copy(update={"count": 1, "standalone": 1}), schedule.model_copy(update={"trainers": None})
    dump(config.model_copy(update={"cells": cells, "schedule": schedule}), paths.config)
    paths.events.write_text(paths.events.read_text().replace('"cells": [["a"], ["b"]]', '"cells": [["a"]], "standalone": ["b"]'))
    found = measure(run)
    assert (found.standalone, found.wall, found.simulated) == (1, 20.0, 20.0)
    assert (found.idle_cells, found.idle_pool, found.idle) == (pytest.approx((0.6,)), pytest.approx(0.5), pytest.approx(0.55))
    assert "50%" in render_rows({("A3", 0): found}, {("A3", 0): 0.7}, 0.5)
    draw_pictures({"A3": found}, tmp_path)
    for kind in ("real", "simulated"):
        assert "1 standalone node: rollout" in (tmp_path / f"{kind}-A3.svg").read_text()
