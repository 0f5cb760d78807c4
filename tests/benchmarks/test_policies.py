"""benchmarks/policies.py apart from its runs: what is measured of a run, and the configurations of the runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.policies import SCHEDULES, Task, plan, write_config
from benchmarks.policies_job import emulate_device
from benchmarks.policies_measure import measure
from benchmarks.policies_table import render
from gyre_hpc.config import check, dump, load
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


def test_runs_of_a_seed_differ_in_their_schedule_alone(tmp_path: Path) -> None:
    tasks = plan(list(SCHEDULES), 2, tmp_path)
    assert [task.seed for task in tasks].count(1) == len(SCHEDULES) - 1
    configs = [load(write_config(task, 12)) for task in tasks]
    for config in configs:
        schedule = config.schedule
        assert schedule.phi + (schedule.mu - 1) / 2 == 1.5
        serving = config.cells.count - (schedule.trainers or 0)
        assert config.harness.slots_per_node * config.cells.count == serving * config.rollout.capacity
    same = [config.model_copy(update=dict.fromkeys(("run", "schedule", "harness", "tasks"))) for config in configs]
    assert all(config == same[0] for config in same)
    harnesses = [config.harness.model_copy(update={"slots_per_node": 1}) for config in configs]
    assert all(harness == harnesses[0] for harness in harnesses)
    assert Task("elastic", 1, tmp_path).run.name == "elastic-seed1"


def test_emulated_device_time_counts_the_real_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(Satellite, "accumulate", lambda self, rows: Sums())
    monkeypatch.setattr(time, "sleep", slept.append)
    emulate_device(0.5)
    assert Satellite.accumulate(object(), [None, None]) == Sums()  # type: ignore[arg-type,list-item]
    assert 0.9 < slept[0] <= 1.0
