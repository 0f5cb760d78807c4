"""What an attempt tells of the checkpointed step, and which weights it says are given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.branches import Branch
from gyre_hpc.checkpoint import RunState
from gyre_hpc.controller.resuming import branch_off, reconcile
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths

SAVED = RunState(4, 4, {"fields": {"step": 4, "loss": 0.5}, "branches": [[2, 10, 40]]})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def told(paths: RunPaths) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in read_events(paths.events)]


def test_a_step_that_was_not_told_is_told_once(paths: RunPaths) -> None:
    events = EventLog(paths.events)
    events.emit("step.end", step=3)
    for _ in range(2):
        reconcile(SAVED, paths, events)
    assert told(paths) == [("step.end", 3), ("checkpoint", 4), ("step.end", 4)]
    assert list(read_events(paths.events))[-1]["loss"] == 0.5


def test_what_was_told_of_weights_that_were_given_up_does_not_count(paths: RunPaths) -> None:
    """Step 4 was done, its checkpoint was lost, it was done again, and the process died right behind the new checkpoint."""
    events = EventLog(paths.events)
    before = [("checkpoint", 4), ("step.end", 4), ("step.end", 5), ("steps.again", 3)]
    for kind, step in before:
        events.emit(kind, step=step)
    for _ in range(2):
        reconcile(SAVED, paths, events)
    events.emit("steps.again", step=4)  # what comes after the step was given up, not the step
    reconcile(SAVED, paths, events)
    assert told(paths) == [*before, ("checkpoint", 4), ("step.end", 4), ("steps.again", 4)]


def test_a_resume_adds_its_branch_and_names_the_steps_that_are_done_again(paths: RunPaths) -> None:
    events = EventLog(paths.events)
    for step in (4, 5, 6):
        events.emit("step.end", step=step)
    branches = branch_off(SAVED, Branch(4, 20, 80), 5, paths, events)
    assert branches.saved() == [[2, 10, 40], [4, 20, 80]]
    last = list(read_events(paths.events))[-1]
    assert {name: last[name] for name in ("kind", "step", "newest", "first_group", "first_execution")} == {
        "kind": "steps.again",
        "step": 4,
        "newest": 6,
        "first_group": 20,
        "first_execution": 80,
    }


def test_a_resume_that_gives_up_no_step_says_nothing(paths: RunPaths) -> None:
    events = EventLog(paths.events)
    events.emit("step.end", step=4)
    assert branch_off(SAVED, Branch(4, 20, 80), 5, paths, events).saved() == [[2, 10, 40], [4, 20, 80]]
    assert told(paths) == [("step.end", 4)]


def test_without_a_checkpoint_all_steps_are_done_again(paths: RunPaths) -> None:
    events = EventLog(paths.events)
    events.emit("step.end", step=1)
    assert branch_off(None, Branch(0, 6, 24), 0, paths, events).saved() == [[0, 6, 24]]
    assert told(paths) == [("step.end", 1), ("steps.again", 0)]
