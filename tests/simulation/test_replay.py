from __future__ import annotations

import json
from pathlib import Path

import pytest

from cells.events import Mode
from gyre_hpc.configfile import check, dump
from gyre_hpc.paths import RunPaths
from gyre_hpc.simulation.facts import Given, gather
from gyre_hpc.simulation.replay import otherwise, replay


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A colocate run of two steps, as a controller and a gateway would log it: one cell, one group of two a step, clock from 100."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    config = {
        "run": {"name": "run", "steps": 2},
        "cells": {"count": 1},
        "rollout": {"capacity": 2},
        "schedule": {"groups_per_step": 1, "group_size": 2, "phi": 0, "mu": 1, "mode": "colocate", "streaming": False},
    }
    dump(check(config, "test"), paths.config)
    step = {"kind": "step.end", "close_seconds": 1.0, "microsteps": 4}
    events = [
        {"t": 90.0, "kind": "run.start", "attempt": 1, "nodes": ["a"], "cells": [["a"]]},
        {"t": 106.0, "kind": "execution.end", "group": 0, "index": 0, "seconds": 6.0},
        {"t": 108.0, "kind": "execution.end", "group": 0, "index": 1, "seconds": 8.0},
        {"t": 110.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 2.0},
        {"t": 115.0, **step, "step": 1, "groups": [0], "train_seconds": 4.0},
        {"t": 116.0, "kind": "publish", "version": 1, "seconds": 1.0},
        {"t": 117.0, "kind": "transfer", "cell": 0, "from": "training", "to": "rollout", "seconds": 1.0},
        {"t": 122.0, "kind": "execution.end", "group": 1, "index": 0, "seconds": 5.0},
        {"t": 122.0, "kind": "execution.end", "group": 1, "index": 1, "seconds": 5.0},
        {"t": 124.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 2.0},
        {"t": 131.0, **step, "step": 2, "groups": [1], "train_seconds": 6.0},
        {"t": 132.0, "kind": "publish", "version": 2, "seconds": 1.0},
    ]
    full = ({"reason": "finished", "score": 1.0, **event, "seq": seq} for seq, event in enumerate(events))
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in full))
    return paths.root


def test_a_run_that_went_as_modelled_is_simulated_to_the_second(run: Path) -> None:
    facts = gather(run, Given())
    found = replay(facts)
    assert found is not None
    assert facts.ran is not None
    assert (found.began, found.steps) == (0.0, (15.0, 31.0))
    assert facts.ran.seconds == 31.0


def test_what_another_schedule_had_made_of_it(run: Path) -> None:
    facts = gather(run, Given())
    assert facts.ran is not None
    # the group of the second step is there already when the first one ends: no time for rollout any more
    longer = otherwise(facts, Mode.COLOCATE, streaming=False, phi=0.0, mu=2)
    assert longer.steps == (8.0 + 5.0 + 2.0 + 4.0 + 1.0, 8.0 + 5.0 + 2.0 + 4.0 + 1.0 + 6.0 + 1.0)


def test_a_file_of_durations_can_not_be_simulated_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"group": 1, "seconds": 3}\n')
    assert replay(gather(file, Given(groups_per_step=2, slots_per_node=1.0, train_node_hours=0.5))) is None


def test_executions_that_supervisors_did_not_run_at_once_wait(run: Path) -> None:
    paths = RunPaths(run)
    paths.config.write_text(paths.config.read_text().replace("slots_per_node: 256", "slots_per_node: 1"))
    found = replay(gather(run, Given()))
    assert found is not None
    assert found.steps == (6.0 + 8.0 + 2.0 + 4.0 + 1.0, 21.0 + 1.0 + 1.0 + 5.0 + 5.0 + 2.0 + 6.0 + 1.0)


def test_executions_beyond_what_engines_hold_run_at_once_if_the_supervisors_run_them(run: Path) -> None:
    paths = RunPaths(run)
    paths.config.write_text(paths.config.read_text().replace("capacity: 2", "capacity: 1"))
    found = replay(gather(run, Given()))
    assert found is not None
    assert found.steps == (15.0, 31.0)
