"""A row is read from the record as it was named, once it is whole in view."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cells.waiting import DeadlineExceeded, wait
from gyre_hpc.branches import Branches
from gyre_hpc.controller.messages import RowRef
from gyre_hpc.controller.rows import Rows
from tests.controller.test_plan import record
from trees.records import Group
from trees.store import StoreReader, StoreWriter


def waits(seconds: float) -> Callable[[Callable[[], Any], str], Any]:
    return partial(wait, deadline=seconds, log=print)


def test_a_row_is_what_was_recorded_and_waits_until_that_is_in_view(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append(Group(0, "task", 1, 0, 0))
        store.commit()
        reader = StoreReader(tmp_path)
        execution = record(store, 0, 0, 1.0, 3)
        ref = RowRef(execution, 0, 0.5, Branches().of_execution(execution))
        with pytest.raises(DeadlineExceeded, match=f"the record of execution {execution}"):
            Rows(reader, 5, 1, waits(0.01)).of(ref)
        rows = Rows(reader, 5, 1, waits(5.0))
        store.commit()
        row = rows.of(ref)
        assert row.tokens.tolist() == [*range(5), *range(3)]
        assert np.flatnonzero(row.targets).tolist() == [5, 6, 7]
        again = rows.of(ref)
        assert again.tokens is row.tokens, "an execution is read once a step"
        rows.forget()
        assert rows.of(ref).tokens.tolist() == row.tokens.tolist()
