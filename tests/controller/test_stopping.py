"""A stop between two checkpoints: when the newest step is saved, and what the log says where it is not."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.controller.messages import Message, Save
from gyre_hpc.controller.stopping import Newest, Saves, beside, for_a_while, save_at_stop
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths

TIMED = [
    {"kind": "checkpoint", "step": 4, "seconds": 9.0},
    {"kind": "checkpoint", "step": 8, "seconds": 4.0},
    {"kind": "checkpoint", "step": 8},
]


class FakeAsking:
    """In place of the cells: the core's leader writes at once, or never answers."""

    def __init__(self, answers: bool = True, overtaken: bool = False) -> None:
        self.asked: list[tuple[Message, float]] = []
        self.names: list[str] = []
        self._answers, self._overtaken = answers, overtaken

    def ask(self, cell: int, message: Message, name: str, deadline: float) -> Generator[None, None, dict[str, Any] | None]:
        assert cell == 0
        self.asked.append((message, deadline))
        self.names.append(name)
        yield
        if self._overtaken:
            return {"failed": "the core's weights are of step 12 by now"}
        return {"checkpoint": {"seconds": 3.0, "bytes": 1000}} if self._answers else None


def saving(asking: FakeAsking, paths: RunPaths, saves: Saves, step: int, left: float, busy: str = "") -> Generator[None, None, bool]:
    return save_at_stop(asking, EventLog(paths.events), saves, Newest(step, {"step": step}, {"branches": []}), left, busy)  # type: ignore[arg-type]


def stop(paths: RunPaths, saves: Saves, step: int, left: float) -> list[tuple[Message, float]]:
    """What the core was asked for."""
    asking = FakeAsking()
    for _ in saving(asking, paths, saves, step, left):
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
        "stop: step 11 is saved, in 3.0 s, after 0.0 s of waiting for the core",
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


def test_one_that_does_not_come_in_time_names_what_the_core_was_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asking = FakeAsking(answers=False)
    with pytest.raises(
        Resumable, match=r"step 2 at the stop, once the core is through with its present micro-step was not there within 8 s"
    ):
        list(saving(asking, RunPaths(tmp_path), Saves(1, []), 2, 8.0, "its present micro-step"))
    assert asking.names == ["the checkpoint of step 2 at the stop, once the core is through with its present micro-step"]
    assert caplog.messages[0].endswith("8.0 s are left), once the core is through with its present micro-step")


def ended(steps: Generator[None, None, Any]) -> Any:
    """What it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def test_a_core_that_has_closed_the_next_step_meanwhile_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saves = Saves(8, TIMED)
    assert ended(saving(FakeAsking(overtaken=True), RunPaths(tmp_path), saves, 11, 9.0)) is False
    assert (saves.step, RunPaths(tmp_path).events.exists()) == (8, False)
    assert caplog.messages[-1] == "stop: no checkpoint of step 11: the core's weights are of step 12 by now"
    assert ended(saving(FakeAsking(), RunPaths(tmp_path), saves, 11, 9.0)) is True


def test_how_much_time_a_save_wants() -> None:
    saves = Saves(8, TIMED)
    assert (saves.needs(8, 30.0), saves.needs(9, 30.0), Saves(0, []).needs(1, 30.0)) == (0.0, 9.0, 15.0)
    assert saves.fits(saves.needs(9, 30.0))[0]


class Work:
    """In place of a transfer: over after so many looks, then it raises `error` if there is one."""

    def __init__(self, looks: int, error: GyreError | None = None) -> None:
        self.done, self.looks, self.closed = 0, looks, False
        self._error = error

    def run(self) -> Generator[None, None, list[object]]:
        try:
            while self.done < self.looks:
                self.done += 1
                yield
            if self._error is not None:
                raise self._error
            return []
        except GeneratorExit:
            self.closed = True
            raise


def test_what_is_in_hand_goes_on_beside_the_save_and_does_not_hold_it_up(caplog: pytest.LogCaptureFixture) -> None:
    save, transfer = Work(3), Work(7)
    for _ in beside(save.run(), transfer.run(), "transfer of cell 1", lambda: 1000.0):  # type: ignore[arg-type]
        pass
    assert (save.done, transfer.done, transfer.closed) == (3, 7, False)
    save, failing = Work(5), Work(2, Resumable("the gateway does not answer", ""))
    for _ in beside(save.run(), failing.run(), "transfer of cell 1", lambda: 1000.0):  # type: ignore[arg-type]
        pass
    assert save.done == 5, "its end is not that of the save"
    assert caplog.messages == ["stop: transfer of cell 1 did not end well: the gateway does not answer"]


def test_what_is_in_hand_gets_no_more_than_its_share_of_the_time(caplog: pytest.LogCaptureFixture) -> None:
    save, endless = Work(3), Work(10**9)
    for _ in beside(save.run(), endless.run(), "publication of version 2", lambda: 0.0):  # type: ignore[arg-type]
        pass
    assert (save.done, endless.closed) == (3, True)
    assert caplog.messages == ["stop: publication of version 2 is given up, 0.0 s are left"]


def test_what_goes_first_has_its_time_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([True] * 3 + [False])
    endless = Work(10**9).run()
    assert ended(for_a_while(endless, "step 2", lambda: next(looks))) is endless, "it may go on"
    assert ended(for_a_while(Work(2).run(), "step 2", lambda: True)) is None
    assert ended(for_a_while(Work(2, Resumable("it is given up", "")).run(), "step 2", lambda: True)) is None
    assert caplog.messages == ["stop: step 2 did not end well: it is given up"]


def test_what_the_save_raises_is_heard(tmp_path: Path) -> None:
    with pytest.raises(Resumable, match="disk"):
        list(beside(Work(0, Resumable("the disk is full", "")).run(), Work(10**9).run(), "x", lambda: 9.0))  # type: ignore[arg-type]
