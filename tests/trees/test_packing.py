import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees.packing import pack


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 200))
def test_every_row_once_and_no_microstep_over_its_budget(lengths, budget):
    packed = pack(lengths, budget)
    assert sorted(row for step in packed for row in step) == list(range(len(lengths)))
    for step in packed:
        assert step
        assert len(step) == 1 or sum(lengths[row] for row in step) <= budget
    assert packed == pack(lengths, budget)
    # No two neighbours could have been one.
    for one, two in itertools.pairwise(packed):
        assert sum(lengths[row] for row in one) + lengths[two[0]] > budget


def test_rows_of_like_length_meet():
    assert pack([1, 50, 2, 49, 200, 1], 100) == [[4], [1, 3], [2, 0, 5]]


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        pack([1], 0)
    with pytest.raises(ValueError, match="at least one token"):
        pack([1, 0], 10)
