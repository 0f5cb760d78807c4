"""Engines that die or fail are ended and started again, as often as is allowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre_hpc.canary import Canary
from gyre_hpc.controller.keeper import Keeper, Stopping
from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineSpec, Holding, NotReceived
from gyre_hpc.errors import GyreError, Resumable

OLD, NEW = Path("version-1"), Path("version-2")


class FakeServer:
    """In place of an engine's process: what it was told, and when to fail."""

    made = 0

    def __init__(self, spec: EngineSpec, deadline: float) -> None:
        FakeServer.made += 1
        self.pid = FakeServer.made
        self.address = EngineAddress("torch", f"http://{self.pid}", 4, 64)
        self.told: list[str] = []
        self.weights: tuple[Path, int] | None = None
        self.fails = ""
        self.claims: int | None = None
        """The version that it says it has, whatever it was given."""
        self.lives = True
        self.wrong = 0
        """Loads that go wrong from here on, whatever it says."""

    def _do(self, what: str) -> None:
        assert self.lives, f"{what} to a dead engine"
        if what == self.fails:
            raise EngineFault(f"{what} failed")
        self.told.append(what)

    def alive(self) -> bool:
        return self.lives

    def holding(self, deadline: float) -> Holding:
        return Holding(64, 1)

    def health(self, deadline: float) -> dict[str, object]:
        return {"version": self.claims if self.claims is not None else self.weights[1] if self.weights else 0}

    def pause(self, deadline: float) -> None:
        self._do("pause")

    def resume(self, deadline: float) -> None:
        self._do("resume")

    def receive_weights(self, source: str, version: int, deadline: float) -> None:
        if self.fails == "arrive":
            raise NotReceived("the stream ended early")
        self._do("receive")
        self.weights = (Path(source), version)

    def release(self, deadline: float) -> None:
        self._do("release")

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        self._do("update")
        self.weights, self.wrong = (model, version), self.wrong - 1

    def restore(self, model: Path, version: int, deadline: float) -> None:
        self._do("restore")
        self.weights = (model, version)

    def logprobs(self, tokens: Sequence[int], deadline: float) -> list[float]:
        return [-1.0 - (0.1 if self.computes_otherwise() else 0.0)] * (len(tokens) - 1)

    def computes_otherwise(self) -> bool:
        """Whether what it loaded last is not what the trainer has."""
        return self.wrong > 0

    def stop(self) -> None:
        self.lives = False


def kept(engines: int = 2, restarts: int = 1, stopping: Callable[[], bool] = lambda: False) -> tuple[Keeper, EngineBank]:
    spec = EngineSpec("torch", OLD, 0, 4, 64, Path("engine.log"))
    bank = EngineBank.start(dict.fromkeys(range(engines), spec), 1.0, FakeServer)  # type: ignore[arg-type]
    return Keeper(bank, 3, restarts, 1.0, lambda _, version: Canary(version, (1, 2, 3), (-1.0, -1.0)), 0.05, stopping), bank


def server(bank: EngineBank, number: int) -> FakeServer:
    found = bank._servers[number]
    assert isinstance(found, FakeServer)
    return found


def test_there_and_back_without_trouble() -> None:
    keeper, bank = kept()
    keeper.release(1.0)
    keeper.load(NEW, 2, 1.0)
    keeper.resume(NEW, 2, 1.0)
    assert server(bank, 1).told == ["pause", "release", "restore", "resume"]
    keeper.load(NEW, 3, 1.0)
    assert server(bank, 0).told[-1] == "update", "one that serves is updated in place"
    assert keeper.news() == {}


def test_who_receives_nothing_loads_from_files_and_who_fails_is_started_again_with_files() -> None:
    keeper, bank = kept(3)
    assert "receive" not in keeper.load(NEW, 1, 1.0)
    server(bank, 1).fails, server(bank, 2).fails = "arrive", "receive"
    took = keeper.load(NEW, 2, 1.0, "node:1/secret")
    assert [server(bank, number).weights for number in range(3)] == [(Path("node:1/secret"), 2), (NEW, 2), (NEW, 2)]
    assert server(bank, 1).told == ["update", "update"], "it lives on"
    assert keeper.news().keys() == {2}
    assert (took["received"], took["fell_back"]) == (1, 1)
    assert took["receive"] <= took["load"]
    keeper.release(1.0)
    keeper.load(NEW, 3, 1.0, "node:1/secret")
    assert server(bank, 0).told[-1] == "restore", "one that was released has nothing to receive into"


def test_one_that_died_is_told_once_and_comes_back_with_the_weights_elsewhere() -> None:
    keeper, bank = kept()
    where = keeper.addresses()
    server(bank, 1).lives = False
    assert keeper.news() == {1: where["1"]["pid"]}
    assert keeper.news() == {}
    assert keeper.revive(NEW, 2) == [1]
    assert server(bank, 1).weights == (NEW, 2)
    assert server(bank, 0).weights is None, "the other one is left alone"
    assert keeper.addresses()["1"] != where["1"]
    assert keeper.addresses()["0"] == where["0"]
    server(bank, 1).lives = False
    with pytest.raises(Resumable, match=r"engine 1 of cell 3 died, after 1 restarts"):
        keeper.revive(NEW, 2)


@pytest.mark.parametrize("fails", ["pause", "release", "restore", "resume"])
def test_one_that_fails_anywhere_on_its_way_is_replaced_before_it_serves(fails: str) -> None:
    keeper, bank = kept()
    first = server(bank, 0)
    first.fails = fails
    keeper.release(1.0)
    assert first.lives is (fails not in ("pause", "release")), "what failed is ended: its memory is free"
    keeper.load(NEW, 2, 1.0)
    keeper.resume(NEW, 2, 1.0)
    assert not first.lives
    assert server(bank, 0) is not first
    assert server(bank, 0).weights == (NEW, 2)
    assert keeper.news() == {0: first.pid}, "it is back already, and its end is told"
    assert keeper.news() == {}


def test_at_a_publication_one_that_can_not_load_is_replaced() -> None:
    keeper, bank = kept(engines=1)
    first = server(bank, 0)
    first.fails = "update"
    keeper.load(NEW, 5, 1.0)
    assert not first.lives
    assert server(bank, 0).weights == (NEW, 5)


def test_one_that_has_another_version_than_it_was_given_is_replaced() -> None:
    keeper, bank = kept()
    first = server(bank, 0)
    first.claims = 1
    seconds = keeper.load(NEW, 2, 1.0)
    assert set(seconds) == {"load", "verify"}
    assert not first.lives
    assert server(bank, 0).weights == (NEW, 2)


def test_a_slow_load_is_verified_with_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], []

    class Slow(FakeServer):
        def update_weights(self, model: Path, version: int, deadline: float) -> None:
            super().update_weights(model, version, deadline)
            clock[0] += 99.0

        def logprobs(self, tokens: Sequence[int], deadline: float) -> list[float]:
            asked.append(deadline)
            return super().logprobs(tokens, deadline)

    keeper, bank = kept(engines=1)
    bank._servers[0] = Slow(bank.specs[0], 1.0)  # type: ignore[assignment]
    monkeypatch.setattr("gyre_hpc.controller.keeper.time", SimpleNamespace(monotonic=lambda: clock[0]))
    keeper.load(NEW, 2, 100.0)
    assert asked == [25.0]


def test_one_that_does_not_compute_as_the_trainer_loads_once_more() -> None:
    keeper, bank = kept()
    first = server(bank, 0)
    first.wrong = 2
    keeper.load(NEW, 2, 1.0)
    assert first.lives
    assert first.told == ["update", "update"]
    assert server(bank, 1).told == ["update"]


def test_one_that_computes_otherwise_again_ends_the_attempt_and_is_named() -> None:
    keeper, bank = kept()
    server(bank, 1).wrong = 9
    with pytest.raises(
        GyreError, match=r"engine 1 of cell 3 .* version 2 .* \[-1\.100, .* expected \[-1\.000, .* 0\.1 nats .* 0\.05 .* version-2"
    ):
        keeper.load(NEW, 2, 1.0)


def test_one_may_be_off_by_what_roundings_do_to_this_model_and_by_no_more() -> None:
    keeper, bank = kept()
    keeper._canary = lambda _, version: Canary(version, (1, 2, 3), (-1.0, -1.0), rounding=0.034)
    server(bank, 1).wrong = 9
    keeper.load(NEW, 2, 1.0)
    assert server(bank, 1).told == ["update"]
    keeper._canary = lambda _, version: Canary(version, (1, 2, 3), (-1.0, -1.0), rounding=0.033)
    with pytest.raises(GyreError, match=r"0\.1 nats apart in the mean, 0\.099 are allowed"):
        keeper.load(NEW, 3, 1.0)


def test_one_that_was_started_again_is_compared_as_well() -> None:
    keeper, bank = kept()

    class Wrong(FakeServer):
        def computes_otherwise(self) -> bool:
            return True

    bank._starter = Wrong  # type: ignore[assignment]
    server(bank, 0).lives = False
    with pytest.raises(GyreError, match="engine 0 of cell 3"):
        keeper.revive(NEW, 2)


def test_all_that_died_are_started_at_once() -> None:
    keeper, bank = kept(engines=3)
    together = threading.Barrier(2, timeout=10.0)

    class Slow(FakeServer):
        def __init__(self, spec: EngineSpec, deadline: float) -> None:
            together.wait()
            super().__init__(spec, deadline)

    bank._starter = Slow  # type: ignore[assignment]
    server(bank, 0).lives = server(bank, 2).lives = False
    assert keeper.revive(NEW, 2) == [0, 2]
    assert bank.dead() == []


def test_once_a_stop_is_near_the_dead_stay_dead_and_nobody_waits_for_those_that_start() -> None:
    near, starting, go_on = False, threading.Event(), threading.Event()

    class Slow(FakeServer):
        def __init__(self, spec: EngineSpec, deadline: float) -> None:
            nonlocal near
            near = True
            starting.set()
            assert go_on.wait(60.0)
            super().__init__(spec, deadline)

    keeper, bank = kept(1, 9, lambda: near)
    bank._starter = Slow  # type: ignore[assignment]
    server(bank, 0).lives = False
    with pytest.raises(Stopping, match=r"engines \[0\] of cell 3 are not started again: the attempt is to stop"):
        keeper.revive(NEW, 2)
    assert starting.is_set(), "while it was starting"
    starting.clear()
    with pytest.raises(Stopping):
        keeper.load(NEW, 2, 1.0)
    assert not starting.is_set(), "it is not even begun"
    keeper.stop()
    go_on.set()


def test_one_that_the_same_signal_ended_in_its_start_is_no_failure() -> None:
    near = False

    class Killed(FakeServer):
        def __init__(self, spec: EngineSpec, deadline: float) -> None:
            nonlocal near
            near = True
            raise EngineFault("it ended with status -15")

    keeper, bank = kept(1, 9, lambda: near)
    bank._starter = Killed  # type: ignore[assignment]
    server(bank, 0).lives = False
    with pytest.raises(Stopping):
        keeper.revive(NEW, 2)
