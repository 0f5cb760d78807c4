"""The engines of a cell's rank take what is announced, and a rank without any takes no notice."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from cells.waiting import DeadlineExceeded
from gyre_hpc import canary
from gyre_hpc.canary import Canary
from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.controller.keeper import Stopping
from gyre_hpc.controller.messages import Command, Update
from gyre_hpc.controller.serving import Serving
from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineSpec
from gyre_hpc.errors import GyreError
from gyre_hpc.stopfile import wish
from tests.controller.test_keeper import FakeServer, server

CELL = 3
ROUGH = 0.5


def config(canary: float | None = None, transfer: float = 30.0) -> Config:
    return check({"rollout": {"canary": canary}, "deadlines": {"transfer": transfer}}, "test")


def version(folder: Path, number: int, rounding: float = 0.0) -> Path:
    """A published version with the canary that the fake engines repeat."""
    path = folder / f"version-{number}"
    Canary(number, (1, 2, 3), (-1.0, -1.0), rounding).write(path / canary.NAME)
    return path


@pytest.fixture
def bank() -> EngineBank:
    spec = EngineSpec("torch", Path("base"), 0, 4, 64, Path("engine.log"))
    return EngineBank.start(dict.fromkeys(range(2), spec), 1.0, FakeServer)  # type: ignore[arg-type]


def started(bank: EngineBank, folder: Path, config: Config) -> Serving:
    coming: Future[EngineBank] = Future()
    coming.set_result(bank)
    Canary(0, (1, 2, 3), (-1.0, -1.0)).write(folder / canary.NAME)
    serving = Serving(config, CELL, coming, folder)
    assert set(serving.start(Path("base"))["engines"]) == {"0", "1"}
    return serving


def test_a_rank_without_engines_takes_no_notice(tmp_path: Path) -> None:
    serving = Serving(config(), CELL, None, tmp_path / "none")
    assert serving.start(Path("base")) == {}
    serving.rule(Command("release", 0, "", 1.0))
    assert serving.update(Update(1, str(tmp_path), (CELL,))) == {}
    assert (serving.news(), serving.addresses()) == ({}, {})
    serving.stop()


def test_there_and_back(bank: EngineBank, tmp_path: Path) -> None:
    serving, weights = started(bank, tmp_path, config()), version(tmp_path, 2)
    for what in ("release", "load", "resume", "where"):
        serving.rule(Command(what, 2, str(weights), 5.0))
    assert server(bank, 0).told == ["pause", "release", "restore", "resume"]
    assert set(serving.addresses()["engines"]) == {"0", "1"}
    serving.stop()
    assert not server(bank, 0).alive()
    assert serving.addresses() == {}


def test_a_publication_is_taken_by_the_cells_that_it_names(bank: EngineBank, tmp_path: Path) -> None:
    serving, weights = started(bank, tmp_path, config()), version(tmp_path, 1)
    assert serving.update(Update(1, str(weights), (CELL - 1,))) == {}
    assert server(bank, 0).weights is None
    report = serving.update(Update(1, str(weights), (CELL - 1, CELL)))
    assert server(bank, 1).weights == (weights, 1)
    assert {"engines", "verify"} <= set(report)
    assert "load" not in report, "the controller has its own clock for that"


def test_an_engine_that_dies_once_a_stop_is_near_ends_no_publication(bank: EngineBank, tmp_path: Path) -> None:
    serving, weights = started(bank, tmp_path, config()), version(tmp_path, 1)
    server(bank, 0).lives = False
    wish(tmp_path, "gateway")
    assert set(serving.update(Update(1, str(weights), (CELL,)))) == {"engines"}
    assert server(bank, 1).weights == (weights, 1)
    with pytest.raises(Stopping):
        serving.rule(Command("revive", 1, str(weights), 5.0))


def test_a_version_that_this_node_does_not_see_in_time_is_named(bank: EngineBank, tmp_path: Path) -> None:
    serving = started(bank, tmp_path, config(transfer=0.05))
    with pytest.raises(DeadlineExceeded, match="version-9 to be seen on this node"):
        serving.rule(Command("load", 9, str(tmp_path / "version-9"), 5.0))


@pytest.mark.parametrize(("said", "allowed"), [(None, True), (0.05, False), (0.2, True)])
def test_what_a_person_allows_is_all_that_is_allowed(bank: EngineBank, tmp_path: Path, said: float | None, allowed: bool) -> None:
    """Its engines are off by 0.1 nats, under a version whose rounding would excuse more."""
    serving, weights = started(bank, tmp_path, config(said)), version(tmp_path, 1, rounding=ROUGH)
    server(bank, 0).wrong = 9
    if allowed:
        assert "engines" in serving.update(Update(1, str(weights), (CELL,)))
    else:
        with pytest.raises(GyreError, match="canary"):
            serving.update(Update(1, str(weights), (CELL,)))


def test_an_unknown_command_is_a_mistake(bank: EngineBank, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown command 'dance'"):
        started(bank, tmp_path, config()).rule(Command("dance", 0, "", 1.0))
