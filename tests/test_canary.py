"""The canary's text, file and distance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gyre_hpc.canary import LENGTH, Canary, read, short, text
from gyre_hpc.errors import GyreError

CANARY = Canary(3, (5, 6, 7), (-1.0, -2.0))


@pytest.mark.parametrize(("vocabulary", "window", "length"), [(2, 1024, LENGTH), (151_936, 1024, LENGTH), (300, 10, 9), (300, 1, 2)])
def test_the_text_is_the_same_everywhere_and_fits(vocabulary: int, window: int, length: int) -> None:
    found = text(vocabulary, window)
    assert found == text(vocabulary, window)
    assert len(found) == length
    assert all(0 <= token < vocabulary for token in found)


def test_it_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "canary.json"
    CANARY.write(path)
    assert read(path) == CANARY
    assert [child.name for child in path.parent.iterdir()] == ["canary.json"]
    path.write_text('{"version": 3}')
    with pytest.raises(GyreError, match=r"canary\.json can't be read"):
        read(path)


def test_the_difference_is_a_mean_and_what_is_missing_or_not_finite_is_far_away() -> None:
    assert CANARY.difference([-1.0, -2.0]) == 0.0
    assert CANARY.difference([-1.5, -1.5]) == 0.5
    for wrong in ([-1.0], [-1.0, -2.0, -3.0], [-1.0, math.nan], [-1.0, -math.inf]):
        assert CANARY.difference(wrong) == math.inf


def test_what_one_rounding_moves_is_allowed_a_few_times_over(tmp_path: Path) -> None:
    path = tmp_path / "canary.json"
    assert CANARY.allowed(0.2) == 0.2
    undecided = CANARY.moved([-1.5, -1.5])
    assert (undecided.rounding, undecided.allowed(0.2), undecided.allowed(2.0)) == (0.5, 1.5, 2.0)
    assert CANARY.moved([-1.0, math.nan]).allowed(0.2) == 0.2, "nothing is known: no engine may be anywhere"
    undecided.write(path)
    assert read(path) == undecided
    path.write_text('{"version": 3, "tokens": [5, 6, 7], "logprobs": [-1.0, -2.0]}')
    assert read(path) == CANARY


def test_a_line_shows_few_values() -> None:
    assert short([-1.0, -2.0]) == "[-1.000, -2.000]"
    assert short([-1.0] * 9) == "[-1.000, -1.000, -1.000, -1.000, ...]"
