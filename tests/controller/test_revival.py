"""Which engines are started again and when, before a made-up gateway and cell."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from cells.roles import CellState
from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command
from gyre_hpc.controller.revival import Revival
from gyre_hpc.errors import Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.gateway.client import ControlClient

T = TypeVar("T")


class FakeWorld:
    """In place of the gateway's client and of `Asking`; `pids` of the cell's engines, a new one where it is revived."""

    def __init__(self, pids: dict[int, int], dead: set[int], silent: bool = False) -> None:
        self.told: list[str] = []
        self.pids, self.dead, self.silent = pids, dead, silent

    def set_route(self, cell: int, address: dict[str, Any] | None, engine: int = 0) -> None:
        self.told.append(f"no route to {engine}" if address is None else f"route {engine}")

    def open_route(self, cell: int) -> None:
        self.told.append("open")

    def call(self, function: Callable[[], T]) -> Generator[None, None, T]:
        yield
        return function()

    def ask(self, cell: int, message: Command, name: str, deadline: float) -> Generator[None, None, dict[str, Any] | None]:
        yield
        self.told.append(message.what)
        if message.what == "revive":
            if self.silent:
                return None
            for engine in self.dead:
                self.pids[engine] += 100
        return {"engines": {str(engine): {"url": "", "pid": pid} for engine, pid in self.pids.items()}}


def revival(world: FakeWorld, log: Path) -> Revival:
    return Revival(cast(Asking, world), cast(ControlClient, world), EventLog(log), DeadlinesSection(), 1)


def run(revival: Revival, cell: int) -> None:
    for _ in revival.run(cell, 3, "weights"):
        pass


def rollout(cell: int) -> CellState:
    return CellState.ROLLOUT


def test_its_route_goes_it_comes_back_and_the_others_stay(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    world = FakeWorld({0: 7, 1: 8}, {1})
    one = revival(world, log)
    one.hear(4, {"1": 8})
    assert one.due(rollout) == 4
    assert set(one.dead(4)) == {1}
    for _ in one.run(4, 3, "weights"):
        assert set(one.dead(4)) == {1}, "until its calls can go there again"
    assert not one.dead(4)
    assert world.told == ["where", "no route to 1", "revive", "route 0", "route 1", "open"]
    assert [(event["kind"], event["engines"]) for event in read_events(log)] == [("engine.died", [1]), ("engine.start", [1])]
    assert one.due(rollout) is None


def test_one_that_a_publication_has_started_again_keeps_its_calls(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    world = FakeWorld({0: 107}, set())
    one = revival(world, log)
    one.hear(0, {"0": 7})
    run(one, 0)
    assert world.told == ["where"]
    assert [event["kind"] for event in read_events(log)] == ["engine.died"]


def test_another_one_that_dies_meanwhile_is_dead_beside_it(tmp_path: Path) -> None:
    one = revival(FakeWorld({0: 7, 1: 8}, {0}), tmp_path / "events.jsonl")
    one.hear(0, {"0": 7})
    going = one.run(0, 3, "weights")
    next(going)
    one.hear(0, {"1": 8})
    assert set(one.dead(0)) == {0, 1}
    for _ in going:
        pass
    assert set(one.dead(0)) == {1}


@pytest.mark.parametrize("trains", [CellState.TRAINING, CellState.RETURNING])
def test_a_cell_that_trains_is_passed_over_and_does_not_hide_another_one(trains: CellState, tmp_path: Path) -> None:
    one = revival(FakeWorld({0: 7}, {0}), tmp_path / "events.jsonl")
    one.hear(2, {"0": 7})
    one.hear(0, {"0": 7})
    states = {0: trains, 2: CellState.ROLLOUT}
    assert one.due(states.__getitem__) == 2
    assert (one.cells, set(one.dead(0))) == ({2}, set())
    states[2] = trains
    assert one.due(states.__getitem__) is None
    assert one.due(rollout) is None, "its return has started what was missing"


def test_a_way_out_that_is_undone_leaves_nobody_dead(tmp_path: Path) -> None:
    one = revival(FakeWorld({0: 7}, {0}), tmp_path / "events.jsonl")
    one.hear(0, {"0": 7})
    assert one.due(lambda cell: CellState.LEAVING) is None, "decided, and not begun"
    assert one.due(rollout) == 0


def test_a_cell_that_does_not_answer_ends_the_attempt(tmp_path: Path) -> None:
    one = revival(FakeWorld({0: 7}, {0}, silent=True), tmp_path / "events.jsonl")
    one.hear(0, {"0": 7})
    with pytest.raises(Resumable, match=r"cell 0 can't start its engine again: did not answer within 450 s"):
        run(one, 0)
