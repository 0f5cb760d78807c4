"""What is asked of whom in each phase, and taken back when one fails: the real driver of transfers before a made-up gateway and cell."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from cells.events import Role
from cells.transfer import Outcome, Phase
from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command, Message, Prefix
from gyre_hpc.controller.transfers import Ended, Order, Transfers
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.gateway.client import ControlClient, PhaseFailed

T = TypeVar("T")
FACTS = {"unroute": {"executions": 2}, "reserve": {"placed": 2}, "hold": {"calls": 1, "conversations": 1}}


class FakeWorld:
    """In place of the gateway's client and of `Asking`: remembers everything in order; `fails` and `silent` name what does not succeed."""

    def __init__(self, fails: str = "", silent: str = "") -> None:
        self.told: list[str] = []
        self.deadlines: dict[str, float] = {}
        """What each was given, where a deadline goes along."""
        self.fails, self.silent = fails, silent
        self.moved: dict[str, Any] = {"url": "new"}

    # the client
    def phase(self, cell: int, phase: str, deadline: float, undo: bool = False) -> dict[str, Any]:
        name = f"{'undo ' if undo else ''}{phase}"
        self.told.append(name)
        self.deadlines[name] = deadline
        if name == self.fails:
            raise PhaseFailed("no luck")
        return {"acknowledged": 2, "moved": 1, "held": 0} if name == "acknowledge" else FACTS.get(name, {})

    def set_route(self, cell: int, address: dict[str, Any], engine: int = 0) -> None:
        assert "pid" not in address
        self.told.append(f"route to {address['url']}")

    def open_route(self, cell: int) -> None:
        self.told.append("open")

    def close_route(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, Any]:
        self.told.append("close")
        return {}

    # asking
    def call(self, function: Callable[[], T]) -> Generator[None, None, T]:
        yield
        return function()

    def agree(self, message: Message, name: str, deadline: float) -> Generator[None, None, list[dict[str, Any]]]:
        yield
        assert isinstance(message, Prefix)
        self.told.append(f"prefix {message.cells}")
        return []

    def ask(self, cell: int, message: Message, name: str, deadline: float) -> Generator[None, None, dict[str, Any] | None]:
        yield
        assert isinstance(message, Command)
        what = message.what if cell else f"core {message.what}"
        self.told.append(what)
        self.deadlines[what] = message.seconds
        assert deadline > message.seconds, "whoever carries it out says so first"
        if what == self.silent:
            return None
        return {"failed": "no luck"} if what == self.fails else {"engines": {"0": {**self.moved, "pid": 9}}}


def run(world: FakeWorld, to: Role, log: Path, may_hold: bool = False, deadlines: DeadlinesSection | None = None) -> Ended:
    transfers = Transfers(cast(Asking, world), cast(ControlClient, world), EventLog(log), deadlines or DeadlinesSection())
    steps = transfers.run(Order(1, to, may_hold, 4, "weights"))
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(Ended, stop.value)


LEAVING = ["unroute", "reserve", "hold", "hand-over", "acknowledge", "release", "core lend", "restore", "prefix 2"]


def test_to_training_and_back_each_phase_is_told(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    world = FakeWorld()
    ended = run(world, Role.TRAINING, log)
    assert (ended.end.outcome, world.told) == (Outcome.DONE, LEAVING)
    assert (ended.facts["moved"], ended.facts["held"]) == (1, 0)
    assert run(back := FakeWorld(), Role.ROLLOUT, log).end.outcome is Outcome.DONE
    assert back.told == ["prefix 1", "offload", "load", "resume", "where", "route to new", "open"]
    phases = [(event["to"], event["phase"]) for event in read_events(log)]
    assert phases == [
        *(("training", name) for name in ("unroute", "reserve", "hold", "hand-over", "acknowledge", "release", "restore", "join")),
        *(("rollout", name) for name in ("leave", "update", "wake", "route")),
    ]


GATEWAY_UNDONE = [f"undo {name}" for name in ("acknowledge", "hand-over", "hold", "reserve", "unroute")]
SERVES_AGAIN = ["load", "resume", "route to new"]


@pytest.mark.parametrize(
    ("fails", "undone"),
    [
        ("unroute", GATEWAY_UNDONE[4:]),
        ("reserve", GATEWAY_UNDONE[3:]),
        ("hold", GATEWAY_UNDONE[2:]),
        ("hand-over", GATEWAY_UNDONE[1:]),
        ("acknowledge", GATEWAY_UNDONE),
        ("release", [*SERVES_AGAIN, *GATEWAY_UNDONE]),
        ("core lend", ["offload", *SERVES_AGAIN, *GATEWAY_UNDONE]),
        ("restore", ["offload", *SERVES_AGAIN, *GATEWAY_UNDONE]),
    ],
)
def test_a_phase_that_fails_takes_the_cell_back_to_rollout(fails: str, undone: list[str], tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    world = FakeWorld(fails)
    ended = run(world, Role.TRAINING, log)
    phase = "restore" if fails == "core lend" else fails
    assert (ended.end.outcome, ended.end.why) == (Outcome.UNDONE, f"{phase}: no luck")
    assert world.told == LEAVING[: LEAVING.index(fails) + 1] + undone
    assert [event["failed"] for event in read_events(log) if "failed" in event] == ["no luck"]
    assert [event["phase"] for event in read_events(log) if event["undo"]][-1] == "unroute"


TRAINS_AGAIN = ["core lend", "restore", "prefix 2"]


@pytest.mark.parametrize(
    ("fails", "phase", "undone"),
    [
        ("offload", "leave", TRAINS_AGAIN),
        ("load", "update", ["release", *TRAINS_AGAIN]),
        ("resume", "wake", ["pause", "release", *TRAINS_AGAIN]),
        ("where", "route", ["close", "pause", "release", *TRAINS_AGAIN]),
    ],
)
def test_on_the_way_back_a_failure_leaves_the_cell_in_training(fails: str, phase: str, undone: list[str], tmp_path: Path) -> None:
    world = FakeWorld(fails)
    ended = run(world, Role.ROLLOUT, tmp_path / "events.jsonl")
    assert (ended.end.outcome, ended.end.why) == (Outcome.UNDONE, f"{phase}: no luck")
    way = ["prefix 1", "offload", "load", "resume", "where"]
    assert world.told == way[: way.index(fails) + 1] + undone


def test_each_phase_has_its_own_deadline(tmp_path: Path) -> None:
    own = {phase.value: 100.0 + at for at, phase in enumerate(Phase)}
    deadlines = DeadlinesSection(transfer=7.0, phases=own)
    run(world := FakeWorld(), Role.TRAINING, tmp_path / "events.jsonl", deadlines=deadlines)
    run(world, Role.ROLLOUT, tmp_path / "events.jsonl", deadlines=deadlines)
    carried = {"core lend": "restore", "offload": "leave", "load": "update", "resume": "wake", "where": "route"}
    assert world.deadlines == {name: own[carried.get(name, name)] for name in world.deadlines}
    assert {carried.get(name, name) for name in world.deadlines} | {"join"} == set(own), "the prefix is agreed on by all leaders"
    run(world := FakeWorld("resume"), Role.ROLLOUT, tmp_path / "events.jsonl", deadlines=DeadlinesSection(transfer=7.0))
    assert set(world.deadlines.values()) == {7.0}, "that of every transfer, the undo's too, where a phase has none"


@pytest.mark.parametrize("silent", ["release", "core lend", "restore"])
def test_a_cell_that_does_not_answer_is_lost(silent: str, tmp_path: Path) -> None:
    ended = run(FakeWorld(silent=silent), Role.TRAINING, tmp_path / "events.jsonl")
    assert ended.end.outcome is Outcome.LOST
    assert "was not answered" in ended.end.why


def test_executions_without_a_place_stop_it_unless_they_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "reserve", {"placed": 1})
    ended = run(FakeWorld(), Role.TRAINING, tmp_path / "events.jsonl")
    assert ended.end.why == "reserve: only 1 of 2 executions have a place elsewhere"
    assert run(FakeWorld(), Role.TRAINING, tmp_path / "more.jsonl", may_hold=True).end.outcome is Outcome.DONE
