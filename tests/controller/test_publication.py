"""The order of a publication, before a made-up gateway and cells."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from gyre_hpc.config import Config, DeadlinesSection
from gyre_hpc.controller import publication
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command, Export, Message, Update
from gyre_hpc.controller.publication import Publisher, hold_calls, path_of, publish
from gyre_hpc.errors import GyreError
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths

T = TypeVar("T")


class FakeWorld:
    """In place of the gateway's client and of `Asking`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.source = ""
        """Where the core offers weights, if it can."""
        self.received = 2
        """Engines, of each cell that serves."""
        self._offered = ""

    def set_route(self, cell: int, address: dict[str, Any], engine: int = 0) -> None:
        self.told.append(f"route {cell}.{engine}")

    def open_route(self, cell: int) -> None:
        self.told.append(f"open {cell}")

    def close_routes(self, cells: Sequence[int], deadline: float) -> dict[str, Any]:
        self.told.append(f"close {cells}")
        return {}

    def call(self, function: Callable[[], T]) -> Generator[None, None, T]:
        yield
        return function()

    def calls(self, functions: Sequence[Callable[[], T]]) -> Generator[None, None, list[T]]:
        yield
        return [function() for function in functions]

    def agree(self, message: Message, name: str, deadline: float) -> Generator[None, None, list[dict[str, Any]]]:
        yield
        self.told.append(type(message).__name__)
        if isinstance(message, Export):
            assert message.engines == 4
            self._offered = self.source if message.offer else ""
            return [{"source": self._offered}, {}, {}, {}] if self._offered else [{}] * 4
        assert isinstance(message, Update)
        assert message.source == self._offered
        received = {"receive": 0.0, "received": self.received, "fell_back": 1} if message.source else {}
        engines = {"0": {"url": "", "pid": 1}, "1": {"url": "", "pid": 2}}
        return [{"engines": engines, "verify": cell / 1e4, **received} if cell in message.cells else {} for cell in range(4)]

    def ask(self, cell: int, message: Message, name: str, deadline: float) -> Generator[None, None, dict[str, Any] | None]:
        yield
        assert isinstance(message, Command)
        self.told.append(f"{message.what} {cell}")
        return {"sent": {"receivers": 99, "bytes": 10, "seconds": 0.25, "meet": 0.125}}


def test_no_route_is_open_while_engines_load_and_late_cells_open_first() -> None:
    world = FakeWorld()
    phases = published(world, "")
    routes = ["route 2.0", "route 2.1", "route 3.0", "route 3.1"]
    assert world.told == ["Export", "close (2, 3)", "Update", *routes, "open 3", "open 2"]
    assert set(phases) == {"write", "close", "load", "verify", "reopen"}
    assert phases["verify"] == 0.0003


def test_the_offer_ends_when_calls_go_on_and_those_who_fell_back_are_told(caplog: pytest.LogCaptureFixture) -> None:
    world = FakeWorld()
    world.source = "node:1/secret"
    phases = published(world, "direct")
    assert world.told[-3:] == ["open 3", "open 2", "withdraw 0"]
    assert list(phases) == ["write", "close", "load", "receive", "verify", "reopen", "send"]
    assert phases["send"] == 0.25
    assert [record.getMessage() for record in caplog.records] == ["version 7: 2 engines loaded it from files, 4 received it"]


def test_in_a_broadcast_the_meeting_is_timed_as_well() -> None:
    world = FakeWorld()
    world.source = "broadcast:node:1/secret"
    phases = published(world, "broadcast")
    assert list(phases) == ["write", "close", "load", "receive", "verify", "reopen", "send", "meet"]
    assert phases["meet"] == 0.125


def test_a_core_that_can_not_offer_publishes_by_files() -> None:
    world = FakeWorld()
    assert "receive" not in published(world, "direct")
    assert world.told[-1] == "open 2"


@pytest.mark.parametrize(
    ("wanted", "engine", "transfers", "offer"),
    [
        ("auto", "vllm", False, ""),
        ("auto", "vllm", True, "broadcast"),
        ("auto", "torch", True, ""),
        ("files", "torch", False, ""),
        ("files", "vllm", True, ""),
        ("direct", "vllm", True, "direct"),
        ("broadcast", "torch", False, "broadcast"),
    ],
)
def test_the_path_is_the_one_wanted_and_has_a_reason(wanted: str, engine: str, transfers: bool, offer: str) -> None:
    found, why = path_of(wanted, engine, transfers)
    assert found == offer
    assert wanted in why


@pytest.mark.parametrize(
    ("path", "received", "offered"),
    [("auto", [0], 1), ("auto", [2, 0, 2, 0, 0], 5), ("direct", [0, 0, 0], 4)],
    ids=["never went well", "twice in a row", "asked for"],
)
def test_what_nobody_receives_is_offered_no_more_where_that_is_ours_to_say(
    path: str, received: list[int], offered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "vllm_transfers", lambda: True)
    world = FakeWorld()
    world.source = "node:1/secret"
    config = Config.model_validate({"publication": {"path": path}, "rollout": {"engine": "vllm"}})
    publisher = Publisher(cast(Asking, world), cast(ControlClient, world), config, RunPaths(tmp_path), tmp_path)
    for version, world.received in enumerate(received, 1):
        drained(publisher.publish(version, (2, 3), 4))
    drained(publisher.publish(9, (2, 3), 4))
    assert world.told.count("withdraw 0") == offered


def published(world: FakeWorld, offer: str) -> dict[str, float]:
    """The phases of a publication into cells 2 and 3."""
    return drained(publish(cast(Asking, world), cast(ControlClient, world), DeadlinesSection(), 7, Path("version-7"), (2, 3), offer, 4))


def drained(steps: Generator[None, None, dict[str, float]]) -> dict[str, float]:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return dict(stop.value)


def test_the_newest_two_versions_stay_on_disk_and_engines_have_the_last(tmp_path: Path) -> None:
    world, paths = FakeWorld(), RunPaths(tmp_path)
    publisher = Publisher(cast(Asking, world), cast(ControlClient, world), Config(), paths, tmp_path / "base")
    assert publisher.weights == tmp_path / "base"
    for version in range(1, 5):
        paths.weights_of(version).mkdir(parents=True)  # as the core does
        drained(publisher.publish(version, (2, 3), 4))
        assert publisher.weights == paths.weights_of(version)
    assert sorted(paths.weights.iterdir()) == [paths.weights_of(3), paths.weights_of(4)]


def test_at_the_end_calls_wait_and_a_gateway_that_can_not_do_that_does_not_hold_the_end_up(caplog: pytest.LogCaptureFixture) -> None:
    world = FakeWorld()
    for _ in hold_calls(cast(Asking, world), cast(ControlClient, world), (0, 3), 5.0):
        pass
    assert world.told == ["close (0, 3)"]

    class Refusing(FakeWorld):
        def close_routes(self, cells: Sequence[int], deadline: float) -> dict[str, Any]:
            raise GyreError("the gateway answered 409", "wait")

    for _ in hold_calls(cast(Asking, Refusing()), cast(ControlClient, Refusing()), (0, 3), 5.0):
        pass
    assert [record.getMessage() for record in caplog.records] == ["calls go on while their engines end: the gateway answered 409; wait"]
