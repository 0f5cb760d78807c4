"""What a run's attempts have left."""

from __future__ import annotations

import shutil
from pathlib import Path

from gyre_hpc.configfile import check
from gyre_hpc.driver.history import is_finished, next_attempt
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths


def test_no_number_of_an_attempt_comes_twice_also_where_the_logs_were_removed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert next_attempt(paths) == 1
    paths.attempt_logs(1).mkdir(parents=True)
    assert next_attempt(paths) == 2, "it died before it told anything"
    EventLog(paths.events).emit("run.start", attempt=1)
    paths.runtime(2).mkdir(parents=True)
    assert next_attempt(paths) == 3
    EventLog(paths.events).emit("run.start", attempt=2)
    shutil.rmtree(paths.logs)
    shutil.rmtree(paths.runtime(2).parent)
    assert next_attempt(paths) == 3


def test_a_run_is_finished_when_it_was_told_done_and_no_more_steps_are_wanted(tmp_path: Path) -> None:
    paths, events = RunPaths(tmp_path), EventLog(RunPaths(tmp_path).events)
    events.emit("checkpoint", step=2)
    events.emit("step.end", step=2)
    two, three = check({"run": {"steps": 2}}, "test"), check({"run": {"steps": 3}}, "test")
    assert not is_finished(paths, two), "nobody said that it ended"
    events.emit("run.end", status="stopped")
    assert not is_finished(paths, two)
    events.emit("run.end", status="done")
    assert is_finished(paths, two)
    assert not is_finished(paths, three)
