"""The training side of a cell's rank: which rows are its own, and what it is not asked for. With a core and MPI: tests/job."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cells.communicators import Communicators
from gyre_hpc.configfile import check
from gyre_hpc.controller import learner as learning
from gyre_hpc.controller.learner import Learner
from gyre_hpc.controller.messages import Close, Export, RowRef, Work
from gyre_hpc.controller.place import Place
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.loss import Sums

STEP = tuple(RowRef(execution, 0, 1.0) for execution in range(5))


class FakeActor:
    """In place of a satellite's model: what it was given."""

    def __init__(self, watched: list[str], sharded: bool) -> None:
        self.rows: list[list[int]] = []
        self.watched, self.sharded = watched, sharded

    def accumulate(self, rows: list[RowRef]) -> Sums:
        self.rows.append([row.execution for row in rows])
        return Sums.of(np.ones(Sums.size()))


class FakeRows:
    """Gives what names a row in place of the row."""

    def of(self, ref: RowRef) -> RowRef:
        return ref

    def forget(self) -> None:
        """Nothing is kept."""


def learner(folder: Path, slot: int = 0, ranks: int = 2, cell: int = 1, stage: int = 1) -> tuple[Learner, FakeActor]:
    config = check({"training": {"deepspeed": {"zero_optimization": {"stage": stage}}}}, "test")
    comm = cast(Communicators, SimpleNamespace(cell=SimpleNamespace()))
    watched: list[str] = []

    def watch(name: str, _seconds: float) -> contextlib.nullcontext[None]:
        watched.append(name)
        return contextlib.nullcontext()

    made = Learner(config, RunPaths(folder), Place(cell, slot, ranks), comm, watch)
    actor = FakeActor(watched, stage == 3)
    made._actor, made._rows = cast(Any, actor), cast(Any, FakeRows())
    return made, actor


def test_the_rows_of_a_micro_step_are_split_over_the_ranks_of_a_cell(tmp_path: Path) -> None:
    given = []
    for slot in range(2):
        made, actor = learner(tmp_path, slot)
        made.take(Work(0, (STEP, STEP[:1])))
        made.do(0)
        made.do(1)
        given.append(actor.rows)
    assert given == [[[0, 2, 4], [0]], [[1, 3]]], "a rank without a row of a micro-step computes nothing"


def test_a_rank_of_a_sharded_cell_computes_also_without_rows_and_is_watched(tmp_path: Path) -> None:
    made, actor = learner(tmp_path, 1, stage=3)
    made.take(Work(0, (STEP, STEP[:1])))
    made.do(0)
    made.do(1)
    assert actor.rows == [[1, 3], []]
    assert actor.watched == ["the cell's ranks in micro-step 0", "the cell's ranks in micro-step 1"]


def test_micro_steps_are_announced_in_order_and_anew_for_each_step(tmp_path: Path) -> None:
    made, _ = learner(tmp_path)
    made.take(Work(0, (STEP,)))
    made.take(Work(1, (STEP, STEP)))
    assert made.known == 3
    with pytest.raises(RuntimeError, match="micro-steps from 5 announced, but 3 are known"):
        made.take(Work(5, (STEP,)))
    assert made.close(Close(step=1, items=3, prefix=1, executions=1, refresh=False, checkpoint=False, fields={}, state={})) == {}
    assert made.known == 0, "also in a cell that does not train"


def test_a_satellite_waits_for_the_stepped_weights_as_long_as_a_step_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sums may be on their way while the core still computes: a micro-step of long rows takes longer than a transfer."""
    made, actor = learner(tmp_path)
    made._ranks = cast(Any, SimpleNamespace(prefix=lambda cells: None))
    weights = np.zeros(3, np.float32)
    pulled: list[Any] = []
    actor.snapshot, actor.pull = lambda: weights, pulled.append  # type: ignore[attr-defined]
    waited: list[float] = []
    pending = SimpleNamespace(wait=lambda name, deadline, log: waited.append(deadline))
    monkeypatch.setattr(learning, "start_broadcast", lambda comm, buffer: pending)
    made._refresh(2)
    assert waited == [made.config.deadlines.step]
    assert pulled[0] is weights


def test_a_satellite_saves_and_publishes_nothing(tmp_path: Path) -> None:
    made, _ = learner(tmp_path)
    assert made.save(1, {}, {}, 1.0) == {}
    assert made.export(Export(1, str(tmp_path / "version-1"), "", 0)) == {}
    assert made.withdraw() == {}
    assert made.progress()
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_never_trains_has_no_model(tmp_path: Path) -> None:
    made, _ = learner(tmp_path)
    made._actor = None
    with pytest.raises(RuntimeError, match="cell 1 has no model of its own"):
        made.offload()
    made.stop()
