from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_hpc.configfile import check, dump
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.paths import RunPaths
from gyre_hpc.simulation.facts import Given, gather
from gyre_hpc.simulation.replay import otherwise, replay


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps on two cells of two nodes: the log that a controller and a gateway write."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    config = {
        "run": {"name": "run", "steps": 2},
        "cells": {"count": 2, "nodes_per_cell": 2},
        "rollout": {"capacity": 12},
        "schedule": {"groups_per_step": 2, "group_size": 2},
        "harness": {"slots_per_node": 5},
    }
    dump(check(config, "test"), paths.config)
    ended = {"t": 10.0, "kind": "execution.end", "reason": "finished", "score": 1.0}
    ends: list[dict[str, object]] = [{**ended, "group": g, "index": i, "seconds": 8.0 + g} for g in (0, 1) for i in (0, 1)]
    events: list[dict[str, object]] = [
        {"t": 0.0, "kind": "run.start", "attempt": 1, "nodes": ["a", "b", "c", "d"], "cells": [["a", "b"], ["c", "d"]]},
        *ends,
        {"t": 12.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 2.0},
        {"t": 20.0, "kind": "step.end", "step": 1, "groups": [0, 1]},
        {"t": 21.0, "kind": "publish", "version": 1, "seconds": 1.0},
        {"t": 22.0, "kind": "transfer", "cell": 0, "from": "training", "to": "rollout", "seconds": 1.0},
        {"t": 32.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 4.0},
        {"t": 44.0, "kind": "step.end", "step": 2, "groups": [2, 3]},
    ]
    paths.events.write_text("".join(json.dumps({"seq": seq, **event}) + "\n" for seq, event in enumerate(events)))
    return paths.root


def test_a_run_tells_everything(run: Path) -> None:
    facts = gather(run, Given())
    assert facts.workload.groups == ((8.0, 8.0), (9.0, 9.0))
    assert (facts.groups_per_step, facts.group_size, facts.steps, facts.smallest_cell, facts.slots_per_node) == (2, 2, 2, 2, 6.0)
    assert (facts.costs.to_training, facts.costs.to_rollout, facts.costs.publish) == (3.0, 1.0, 1.0)
    # step 1: 8 s on 2 nodes for 2 groups; step 2: 1 s of the return's wait and 12 s: 13 s; the lower quartile of 8 and 13
    assert facts.train_group == pytest.approx(8 + 0.25 * 5)
    assert facts.ran is not None
    assert (facts.ran.schedule.capacity, facts.ran.nodes_per_cell, facts.ran.began, facts.ran.seconds) == ((12, 12), 2, 1.0, 43.0)
    assert facts.ran.at_once == 4 * 5
    assert facts.staleness_bound is None


def test_training_seconds_and_closing_are_taken_when_a_run_tells_them(run: Path) -> None:
    paths = RunPaths(run)
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    for event in events:
        if event["kind"] == "step.end":
            event |= {"train_seconds": 6.0 + event["step"], "step_seconds": 0.5, "microsteps": 3}
    events.append({"seq": len(events), "t": 45.0, "kind": "checkpoint", "step": 2, "seconds": 2.0, "bytes": 1})
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    facts = gather(run, Given())
    assert facts.train_group == pytest.approx((3.5 + 4.0) / 2)
    assert facts.costs.close == 2.0 / 2 + 0.5  # one checkpoint in two steps
    assert facts.costs.grain == (7.0 + 8.0) / 2 / 6  # on two nodes
    assert facts.ran is not None
    assert facts.ran.train_groups == (3.5, 3.5)


def test_a_close_that_is_told_whole_is_taken_whole(run: Path) -> None:
    paths = RunPaths(run)
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    for event in events:
        if event["kind"] == "step.end":
            event |= {"step_seconds": 0.5, "close_seconds": 0.25 * event["step"]}
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert gather(run, Given()).costs.close == 0.375


def test_options_win_over_the_run(run: Path) -> None:
    facts = gather(
        run, Given(groups_per_step=4, steps=7, train_node_hours=1.0, smallest_cell=1, slots_per_node=3.5, group_size=8, beta=0.1)
    )
    assert (facts.groups_per_step, facts.group_size, facts.steps, facts.smallest_cell, facts.slots_per_node) == (4, 8, 7, 1, 3.5)
    assert (facts.train_group, facts.beta) == (900.0, 0.1)


def test_what_a_file_of_durations_does_not_tell_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"group": 1, "seconds": 3}\n')
    with pytest.raises(ConfigError, match="--groups-per-step, --slots-per-node, --train-node-hours"):
        gather(file, Given())
    with pytest.raises(ConfigError, match="give --train-node-hours"):
        gather(file, Given(groups_per_step=2, slots_per_node=1.0))
    assert gather(file, Given(groups_per_step=2, slots_per_node=1.0, train_node_hours=0.5)).ran is None
    with pytest.raises(ConfigError, match=r"without config\.yaml"):
        gather(tmp_path, Given())


def test_what_nobody_tells_is_named_as_assumed(run: Path, tmp_path: Path) -> None:
    found = gather(run, Given(steps=7, beta=0.5))
    assert found.assumed == {"group_spread", "seconds_grain", "seconds_hand_over"}
    assert found.given == {"steps", "beta"}
    file = tmp_path / "trace.jsonl"
    file.write_text('{"group": 1, "seconds": 3}\n')
    costs = {f"seconds_{name}" for name in ("to_training", "to_rollout", "hand_over", "close", "publish", "grain")}
    options = Given(groups_per_step=2, slots_per_node=1.0, train_node_hours=0.5, steps=3, smallest_cell=1, beta=0.1)
    told = gather(file, options)
    assert told.assumed == {"group_size", "group_spread", *costs}
    assert told.given == {"groups_per_step", "slots_per_node", "train_group_node_seconds", "steps", "smallest_cell", "beta"}


@pytest.mark.parametrize("lacking", ["nothing", "events", "executions"])
def test_what_is_not_there_is_said_before_what_else_is_lacking(run: Path, tmp_path: Path, lacking: str) -> None:
    events = RunPaths(run).events
    if lacking == "executions":
        events.write_text("")
        words = "tells of no execution that ended"
    else:
        events.unlink()
        words = r"No such file or directory; give a run's directory, or a file of JSON lines"
    with pytest.raises(GyreError, match=words):
        gather(tmp_path / "nowhere" if lacking == "nothing" else run, Given())


def test_a_configuration_that_was_changed_first_is_no_time_of_the_run(run: Path) -> None:
    """`config.change` may be the log's first line, hours before the run began."""
    events = RunPaths(run).events
    before = gather(run, Given())
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    change = {"seq": -1, "t": lines[0]["t"] - 9000.0, "kind": "config.change", "changes": {}}
    events.write_text("".join(json.dumps(line) + "\n" for line in [change, *lines]))
    assert gather(run, Given()) == before


def test_a_way_back_that_no_cell_took_is_as_long_beside_the_way_there_as_in_the_paper(run: Path) -> None:
    paths = RunPaths(run)
    kept = [line for line in paths.events.read_text().splitlines() if json.loads(line).get("to") != "rollout"]
    paths.events.write_text("".join(f"{line}\n" for line in kept))
    facts = gather(run, Given())
    assert (facts.costs.to_training, facts.costs.to_rollout) == pytest.approx((3.0, 3.0 * 3.46 / 8.52))
    assert "seconds_to_rollout" in facts.assumed


def test_what_the_engines_said_that_they_hold_is_taken_before_the_configuration(run: Path) -> None:
    paths = RunPaths(run)
    told = {"seq": 99, "t": 0.5, "kind": "engines", "capacity": [8, 10], "standalone": [3, 4]}
    paths.events.write_text(paths.events.read_text() + json.dumps(told) + "\n")
    facts = gather(run, Given())
    assert facts.slots_per_node == 4.0
    assert facts.ran is not None
    assert (facts.ran.schedule.capacity, facts.ran.schedule.standalone_capacity) == ((8, 10), 7)


def crowd(run: Path, slots_per_node: int) -> None:
    """The run again, under async: one cell of 12 places that rolls out, 24 executions on it at once, 10 s each."""
    paths = RunPaths(run)
    config = {
        "run": {"name": "run", "steps": 2},
        "cells": {"count": 2, "nodes_per_cell": 2},
        "rollout": {"capacity": 12},
        "schedule": {"mode": "async", "trainers": 1, "groups_per_step": 2, "group_size": 2},
        "harness": {"slots_per_node": slots_per_node},
    }
    paths.config.unlink()
    dump(check(config, "test"), paths.config)
    start, *rest = [json.loads(line) for line in paths.events.read_text().splitlines()]
    to_training = {"t": 0.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 0.0}
    end = {"t": 10.0, "kind": "execution.end", "reason": "finished", "score": 1.0, "seconds": 10.0}
    events = [start, to_training, *({**end, "group": g, "index": i} for g in range(12) for i in (0, 1))]
    events += [event for event in rest if event["kind"] in ("step.end", "publish")]
    paths.events.write_text("".join(json.dumps({**event, "seq": seq}) + "\n" for seq, event in enumerate(events)))


def test_other_schedules_of_a_crowded_run_are_made_from_work_without_the_waiting(run: Path) -> None:
    crowd(run, slots_per_node=6)
    facts = gather(run, Given())
    assert facts.ran is not None
    assert facts.ran.at_once == 24
    assert facts.workload.mean == pytest.approx(10.0)
    assert facts.work.mean == pytest.approx(5.0)
    s = facts.ran.schedule
    same = otherwise(facts, s.mode, s.streaming, s.phi, s.mu, s.trainers)
    queued = otherwise(replace(facts, uncrowded=None), s.mode, s.streaming, s.phi, s.mu, s.trainers)
    assert same.execution_mean == pytest.approx(queued.execution_mean / 2)
    again = replay(facts)
    assert again is not None
    assert again.execution_mean == pytest.approx(10.0)


def test_a_run_that_was_not_crowded_has_its_durations_for_work(run: Path) -> None:
    crowd(run, slots_per_node=3)
    facts = gather(run, Given())
    assert facts.work is facts.workload
