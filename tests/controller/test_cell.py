"""What a cell's rank does before it follows anything. All else needs MPI: tests/job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cells.communicators import Communicators
from gyre_hpc.config import Config
from gyre_hpc.controller import cell
from gyre_hpc.controller.cell import CellRank
from gyre_hpc.paths import RunPaths


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
