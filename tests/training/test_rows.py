"""Rows refuse what can't be trained; stacking loses nothing and changes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.training.rows import TrainRow, share, stack
from tests.training.conftest import make_rows
from trees.selection import Path


def row(**changes: Any) -> TrainRow:
    fields: dict[str, Any] = {
        "tokens": np.array([5, 6, 7], np.int32),
        "targets": np.array([False, True, False]),
        "logprobs": np.array([np.nan, -1.0, np.nan], np.float32),
        "versions": np.array([-1, 2, -1], np.int32),
        "weight": 0.5,
        "advantage": -1.0,
    }
    return TrainRow(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.array([True, True, False])}, "first token"),
        ({"targets": np.zeros(3, bool)}, "0 targets"),
        ({"targets": np.zeros(2, bool)}, "2 targets"),
        ({"logprobs": np.full(3, np.nan, np.float32)}, "not finite"),
        ({"logprobs": np.full(3, -np.inf, np.float32)}, "not finite"),
        ({"advantage": float("nan")}, "advantage nan"),
        ({"weight": 0.0}, r"weight 0\.0"),
        ({"weight": 1.5}, r"weight 1\.5"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**change)


def test_a_selected_path_becomes_a_row() -> None:
    good = row()
    path = Path(7, 0, 3, (1, 3), good.tokens, good.targets, good.logprobs, good.versions, 0.25)
    made = TrainRow.of(path, 0.75)
    assert (made.weight, made.advantage, made.targets.sum()) == (0.25, 0.75, 1)
    assert made.tokens is good.tokens


@settings(max_examples=50, deadline=None)
@given(executions=st.integers(1, 8), seed=st.integers(0, 1000), budget=st.integers(1, 300))
def test_every_target_is_stacked_once_within_the_budget(executions: int, seed: int, budget: int) -> None:
    rows = [dataclasses.replace(r, advantage=float(i)) for i, r in enumerate(make_rows(executions, seed))]
    batches = stack(rows, budget, pad=60)
    seen: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert batch.ids.size <= budget or len(batch.ids) == 1
        for k, (r, position) in enumerate(zip(batch.row, batch.position, strict=True)):
            which = int(batch.advantage[r])
            original = rows[which]
            seen[which, int(position)] += 1
            assert batch.ids[r, position] == original.tokens[position]
            assert batch.behaviour[k] == original.logprobs[position]
            assert batch.version[k] == original.versions[position]
            assert batch.weight[r] == np.float32(original.weight)
    assert seen == Counter((i, int(t)) for i, r in enumerate(rows) for t in np.flatnonzero(r.targets))
    assert sum(batch.tokens for batch in batches) == sum(len(r.tokens) for r in rows)


def test_padding_is_small_for_rows_of_like_length() -> None:
    rows = make_rows(60, 3)
    batches = stack(rows, 256)
    assert sum(b.ids.size for b in batches) < 1.25 * sum(b.tokens for b in batches)


def test_no_rows_no_batches() -> None:
    assert stack([], 100) == []


@pytest.mark.parametrize(("ranks", "budget"), [(1, 4096), (2, 4096), (3, 2731), (64, 128), (10_000, 1)])
def test_a_rank_of_many_takes_its_part_of_a_micro_step(ranks: int, budget: int) -> None:
    assert share(4096, ranks) == budget


def test_a_long_row_among_short_ones_is_not_padded_to_the_size_of_the_cell_s_micro_step() -> None:
    """65,536 tokens over 64 ranks: the first rank's are one row of 4,000 and fifteen of 60."""
    lengths = [4000, *[60] * 1000][::64]
    rows = [
        row(tokens=np.full(n, 5, np.int32), targets=np.arange(n) > 0, logprobs=np.full(n, -1.0, np.float32), versions=np.zeros(n, np.int32))
        for n in lengths
    ]
    assert [batch.ids.size for batch in stack(rows, share(65_536, 64))] == [4000, 15 * 60]
    assert [batch.ids.size for batch in stack(rows, 65_536)] == [16 * 4000]
