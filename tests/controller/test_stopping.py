"""A stop between two checkpoints: when the newest step is saved, and what the log says where it is not."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.controller.messages import Message, Save
from gyre_hpc.controller.stopping import Saves, save_at_stop
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths

TIMED = [
    {"kind": "checkpoint", "step": 4, "seconds": 9.0},
    {"kind": "checkpoint", "step": 8, "seconds": 4.0},
    {"kind": "checkpoint", "step": 8},
]


class FakeAsking:
    """In place of the cells: the core writes at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[Message, float]] = []

    def agree(self, message: Message, name: str, deadline: float) -> Generator[None, None, list[dict[str, Any]]]:
        self.asked.append((message, deadline))
        yield
        return [{"checkpoint": {"seconds": 3.0, "bytes": 1000}}, {}]


def stop(paths: RunPaths, saves: Saves, step: int, left: float) -> list[tuple[Message, float]]:
    """What the cells were asked for."""
    asking = FakeAsking()
    for _ in save_at_stop(asking, EventLog(paths.events), saves, step, {"step": step}, {"branches": []}, left):  # type: ignore[arg-type]
        pass
    return asking.asked


def told(paths: RunPaths) -> list[dict[str, Any]]:
    return [{name: value for name, value in event.items() if name not in ("t", "seq")} for event in read_events(paths.events)]


def test_the_newest_step_is_saved_where_half_as_long_again_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saves = Saves(8, TIMED)
    assert stop(RunPaths(tmp_path), saves, 11, 7.0) == [(Save(11, {"step": 11}, {"branches": []}, 7.0), 7.0)]
    assert told(RunPaths(tmp_path)) == [{"kind": "checkpoint", "step": 11, "seconds": 3.0, "bytes": 1000, "stop": True}]
    assert (saves.step, saves.seconds) == (11, 3.0)
    assert [record.getMessage() for record in caplog.records] == [
        "stop: writing a checkpoint of step 11 (the last took 4.0 s, 7.0 s are left)",
        "stop: step 11 is saved, in 3.0 s",
    ]


def test_where_it_does_not_fit_the_log_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert stop(RunPaths(tmp_path), Saves(8, TIMED), 11, 6.9) == []
    assert [record.getMessage() for record in caplog.records] == [
        "stop: no checkpoint of step 11 (the last took 4.0 s, 6.9 s are left: deadlines.stop); the steps behind 8 are done again"
    ]
    assert not RunPaths(tmp_path).events.exists()


def test_a_step_that_has_its_checkpoint_is_not_saved_again(tmp_path: Path) -> None:
    saves = Saves(0, [])
    saves.took(6, 2.0)
    assert stop(RunPaths(tmp_path), saves, 6, 1000.0) == []
    assert stop(RunPaths(tmp_path), Saves(0, []), 0, 1000.0) == [], "no step is done"


def test_where_none_was_ever_timed_it_is_tried(tmp_path: Path) -> None:
    assert [message.step for message, _ in stop(RunPaths(tmp_path), Saves(0, []), 2, 8.0) if isinstance(message, Save)] == [2]
    assert stop(RunPaths(tmp_path), Saves(0, []), 2, 0.5) == []
