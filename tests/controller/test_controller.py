"""The controller at a stop, before made-up cells and a made-up gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cells.epochs import Channel
from cells.events import (
    CloseStep,
    Event,
    ExecutionFinished,
    GroupComplete,
    GroupDispatched,
    Published,
    Role,
    StepDone,
    Transfer,
    TransferDone,
)
from cells.lines import Lines
from gyre_hpc import stopfile
from gyre_hpc.configfile import check
from gyre_hpc.controller import stopping
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.engines import Engines
from gyre_hpc.controller.stepwork import Counter
from gyre_hpc.errors import ExitCode, Resumable
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths
from gyre_hpc.tasks.source import TaskSource

LEFT = 6.0
"""Seconds until the driver ends everything."""


class FakeCells:
    """In place of the channel, the lines and the gateway's client: all is acknowledged at once, and remembered."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.lines = self
        self.notes: list[tuple[int, dict[str, Any]]] = []
        self.closed = 10**9
        """The core has closed the next step at this answer to a save."""
        self.pid = 7
        """Of the engine of every cell; the next once it is revived."""

    def announce(self, message: dict[str, Any], agree: bool) -> int:
        self.told.append(message)
        return len(self.told)

    def reports(self, epoch: int) -> list[dict[str, Any]]:
        return [{}]

    def ask(self, rank: int, message: dict[str, Any]) -> int:
        assert message["kind"] == "Command" or (rank, message["kind"]) == (1, "Save"), "the core's leader"
        self.told.append(message)
        self.pid += message.get("what") == "revive"
        return 0

    def answer_to(self, number: int) -> dict[str, Any]:
        self.closed -= 1
        if self.told[-1]["kind"] == "Save" and self.closed == 0:
            return {"failed": "the core's weights are of step 2 by now"}
        return {"checkpoint": {"seconds": 1.0, "bytes": 8}, "engines": {"0": {"url": "", "pid": self.pid}}}

    def set_route(self, cell: int, address: dict[str, Any] | None, engine: int = 0) -> None:
        self.told.append({"kind": "route" if address else "no route"})

    def open_route(self, cell: int) -> None:
        self.told.append({"kind": "open"})

    def close_routes(self, cells: Any, deadline: float) -> None:
        self.told.append({"kind": "routes closed", "in time": 0 < deadline <= LEFT / 2})

    def status(self) -> dict[str, Any]:
        return {}

    def note(self) -> tuple[int, dict[str, Any]] | None:
        return self.notes.pop(0) if self.notes else None

    def close(self) -> None:
        pass

    def drain(self) -> bool:
        return True


def group(number: int, version: int) -> Iterator[Event]:
    """The life of a group of two executions."""
    yield GroupDispatched(number, version, 2)
    yield from [ExecutionFinished(number)] * 2
    yield GroupComplete(number, 2)


def made(paths: RunPaths, cells: FakeCells, count: int = 1) -> Controller:
    """One with a single cell (or `count`) and four steps, none of which has a checkpoint before the last."""
    config = check(
        {
            "cells": {"count": count},
            "run": {"steps": 4},
            "schedule": {"groups_per_step": 1, "group_size": 2, "phi": 0, "mu": 1},
            "rollout": {"capacity": 2},
            "checkpoint": {"every": 4},
        },
        "test",
    )
    paths.runtime(1).mkdir(parents=True)
    return Controller(
        config,
        paths,
        1,
        paths.root,
        cast(Channel, cells),
        cast(Lines, cells),
        cast(ControlClient, cells),
        cast(TaskSource, None),
        None,
        cast(Counter, None),
    )


def test_a_stop_before_a_decided_close_saves_the_step_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, cells = RunPaths(tmp_path), FakeCells()
    controller = made(paths, cells)
    policy = controller.policy
    policy.start()
    first = [*group(0, 0), TransferDone(0, Role.TRAINING), StepDone(1), Published(1), TransferDone(0, Role.ROLLOUT)]
    decided = [policy.on(event) for event in [*first, *group(1, 1), TransferDone(0, Role.TRAINING)]][-1]
    assert decided[-1] == CloseStep(2), "the step is full"
    controller._decisions.extend(decided)
    controller._told = {"step": 1}
    monkeypatch.setattr(controller, "_start", lambda: iter(()))
    monkeypatch.setattr(controller._changes, "follow", lambda after: stopfile.ask(paths.runtime(1), LEFT))

    assert controller.run() is ExitCode.RESUMABLE
    save, closed, stop = cells.told
    assert (save["kind"], closed["kind"], stop["kind"]) == ("Save", "routes closed", "Stop"), "a gateway that is gone costs no checkpoint"
    assert closed["in time"]
    assert (save["step"], save["fields"]) == (1, {"step": 1})
    assert save["state"]["schedule"] == {"step": 1, "burst": 1, "skipped": 0, "consumed_below": 1, "consumed": []}, "step 2 is not done"


@pytest.mark.parametrize(
    ("looks", "overtaken", "saved"),
    [(5, 0, [2]), (10**9, 0, [1]), (11, 1, [1, 2])],
    ids=["it ends", "it does not end in time", "it ends after all"],
)
def test_a_close_goes_first_as_long_as_the_step_before_it_can_still_be_saved(
    looks: int, overtaken: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = FakeCells()
    controller = made(RunPaths(tmp_path), cells)
    policy = controller.policy
    policy.start()
    for event in [*group(0, 0), TransferDone(0, Role.TRAINING), StepDone(1), Published(1), TransferDone(0, Role.ROLLOUT), *group(1, 1)]:
        policy.on(event)
    assert policy.on(TransferDone(0, Role.TRAINING))[-1] == CloseStep(2)
    controller._told, cells.closed = {"step": 1}, overtaken or cells.closed

    def close() -> Iterator[None]:
        for _ in range(looks):
            yield
        controller._told = {"step": 2}
        return [StepDone(2)]

    controller._begin(close(), "step 2", closing=True)  # type: ignore[arg-type]
    left = iter(range(1000))
    monkeypatch.setattr(controller._stop_file, "left", lambda: 20.0 - next(left))
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: float(next(left))))
    for _ in controller._save_beside():
        pass
    assert [told["step"] for told in cells.told] == saved
    assert cells.told[-1]["fields"] == {"step": saved[-1]}
    assert cells.told[-1]["state"]["schedule"]["step"] == saved[-1]


def test_what_fails_once_a_stop_is_near_is_given_up_and_the_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM has come to all processes; the driver has not asked for the stop yet, and a transfer finds its engine dead."""
    paths, cells = RunPaths(tmp_path), FakeCells()
    controller = made(paths, cells)
    policy = controller.policy
    policy.start()
    first = [*group(0, 0), TransferDone(0, Role.TRAINING), StepDone(1), Published(1)]
    decided = [policy.on(event) for event in first][-1]
    controller._decisions.extend(decision for decision in decided if isinstance(decision, Transfer))
    assert controller._decisions
    controller._told = {"step": 1}
    looks = 0

    def transfer(decision: object) -> Iterator[None]:
        yield
        raise Resumable("the engine is gone", "")

    def changes() -> Iterator[None]:
        nonlocal looks
        looks += 1
        if looks == 2:
            stopfile.wish(paths.runtime(1), "rank-00001")
        if looks == 8:
            assert controller._activity is None, "nothing begins any more"
            stopfile.ask(paths.runtime(1), LEFT)
        return iter(())

    monkeypatch.setattr(controller, "_transfer", transfer)
    monkeypatch.setattr(controller, "_start", lambda: iter(()))
    monkeypatch.setattr(controller._changes, "follow", lambda after: None)
    monkeypatch.setattr(controller._changes, "take", changes)

    assert controller.run() is ExitCode.RESUMABLE
    assert [told["kind"] for told in cells.told] == ["Save", "routes closed", "Stop"]
    stopfile.withdraw(paths.runtime(1))
    controller._activity = transfer(None)  # type: ignore[assignment]
    assert not controller._advance_activity()
    with pytest.raises(Resumable, match="the engine is gone"):
        controller._advance_activity()


def test_the_waterlevel_counts_no_slot_of_a_dead_engine_until_its_calls_can_go_there_again(tmp_path: Path) -> None:
    cells = FakeCells()
    controller = made(RunPaths(tmp_path), cells, 2)
    engine = {"kind": "torch", "url": "u", "window": 100, "handover": "", "capacity": 2, "pid": 7, "kv_tokens": 200, "holds": 2}
    controller._engines = Engines([{"engines": {"0": engine}}] * 2)
    policy = controller.policy
    policy.start()
    assert policy.capacity == 4
    cells.notes = [(2, {"died": {"0": 7}})]
    controller._take_notes()
    assert policy.capacity == 2
    assert controller._begin_revival()
    while controller._activity is not None:
        assert policy.capacity == 2, "not before its route is open"
        controller._advance_activity()
    assert [told.get("what", told["kind"]) for told in cells.told] == ["where", "no route", "revive", "route", "open"]
    assert policy.capacity == 4
