"""What a cell's rank does before it follows anything. All else needs MPI: tests/job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cells.communicators import Communicators
from cells.epochs import Channel
from cells.pump import Pump
from gyre_hpc.config import Config
from gyre_hpc.controller import cell
from gyre_hpc.controller.cell import CellRank, _put_together
from gyre_hpc.controller.hearing import Hearing
from gyre_hpc.controller.messages import Close, Message, Save, Stop, Work, encode
from gyre_hpc.controller.place import Place
from gyre_hpc.paths import RunPaths
from tests.controller.test_hearing import FakeChannel


def test_what_mpi_makes_together_with_other_ranks_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[str, float]] = []
    made: list[tuple[str, list[tuple[str, float]]]] = []

    @contextmanager
    def watch(name: str, seconds: float) -> Iterator[None]:
        watched.append((name, seconds))
        yield
        watched.pop()

    def maker(kind: str) -> Callable[[Any], Any]:
        return lambda comm: made.append((f"{kind} of the {comm.name}", list(watched)))

    monkeypatch.setattr(cell, "Channel", maker("channel"))
    monkeypatch.setattr(cell, "Lines", maker("lines"))
    own, control = SimpleNamespace(name="cell", Get_size=lambda: 2), SimpleNamespace(name="leaders")
    ranks = cast(Communicators, SimpleNamespace(cell=own, control=control, cell_index=0, slot=0))
    config = Config()
    CellRank(config, RunPaths(tmp_path), tmp_path, ranks, cast(Any, None), None, None, tmp_path, watch)
    deadline = [("MPI to make the cell's channels", config.deadlines.start)]
    kinds = ["channel of the cell", "channel of the leaders", "lines of the cell", "lines of the leaders"]
    assert made == [(kind, deadline) for kind in kinds], "in the order in which all ranks make them"


class Computing:
    """In place of a learner in training: its micro-step goes through a model until somebody ends it."""

    def __init__(self) -> None:
        self.trains, self.known = True, 5
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
        self.actor = self
        self.passes = 0

    def do(self, item: int) -> None:
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            self.passes += 1
            self.model.layers[0](torch.zeros(1))
        pytest.fail("nobody ended it")

    def progress(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("leads", "heard", "asked"),
    [(True, (), [Save(1, {}, {}, 9.0)]), (True, (Stop("stopped"),), []), (False, (Save(1, {}, {}, 9.0),), [])],
    ids=["a save is asked of the leader", "the attempt stops", "a save is relayed"],
)
def test_a_micro_step_is_given_up_for_the_stop_and_no_other_is_taken(leads: bool, heard: tuple[Message, ...], asked: list[Message]) -> None:
    channel = FakeChannel(Work(0, ()), *heard)
    rank: Any = CellRank.__new__(CellRank)
    rank.config, rank.place = Config(), Place(0, 0 if leads else 1, 1)
    rank._learner, rank._interrupt, rank._gave_up = Computing(), None, False
    rank._hearing, rank._inner = Hearing(cast(Channel, channel), lambda message: False), SimpleNamespace(progress=lambda: None)
    rank._lines = SimpleNamespace(ahead=lambda: [encode(message) for message in asked])
    rank._pump = Pump(rank._turn, 0.001)
    rank._claims = SimpleNamespace(claim=lambda upto: 0)
    rank._do(0)
    assert rank._learner.passes > 0
    assert rank._work_once() is False
    assert rank._follow(Close(1, 5, 1, 1, False, False), {}) == {"given_up": True}, "and no step is closed without it"


@pytest.mark.parametrize("stops", [True, False])
def test_the_sums_of_a_close_are_left_for_the_stop(stops: bool) -> None:
    channel = FakeChannel()
    rank: Any = CellRank.__new__(CellRank)
    rank.config, rank.place, rank._gave_up = Config(), Place(0, 0, 2), False
    rank._hearing = Hearing(cast(Channel, channel), lambda message: False)
    rank._lines = SimpleNamespace(ahead=lambda: [encode(Save(1, {}, {}, 9.0))] if stops else [])
    told: list[dict[str, Any]] = []
    rank._inner = SimpleNamespace(announce=lambda raw, agree: told.append(raw) or 0, reports=lambda epoch: [{}])
    rank._claims = SimpleNamespace(next_step=lambda items: None, claim=lambda upto: None)

    def close(message: Close, tell: object, look: Callable[[], None]) -> dict[str, Any]:
        look()
        return {"fields": {}}

    rank._learner = SimpleNamespace(trains=True, close=close)
    close_ = Close(1, 0, 1, 1, False, False)
    report = rank._follow(close_, encode(close_))
    assert report == ({"given_up": True} if stops else {"fields": {}, "engines": {}})
    assert told == [encode(close_)], "the cell's other ranks hear of it, and of what follows"


def test_a_cell_s_report_is_that_of_all_its_ranks() -> None:
    report: dict[str, Any] = {"engines": {"0": {}}, "verify": 0.5, "received": 1.0}
    _put_together(report, {"engines": {"1": {}}, "verify": 0.25, "receive": 2.0, "received": 1.0, "fell_back": 1.0, "failed": "late"})
    _put_together(report, {"failed": "later"})
    assert report == {
        "engines": {"0": {}, "1": {}},
        "verify": 0.5,
        "receive": 2.0,
        "received": 2.0,
        "fell_back": 1.0,
        "failed": "late",
    }
