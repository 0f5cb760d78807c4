import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees.advantages import group_advantages

scores = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=16)


@given(scores)
def test_invalid_executions_change_nothing(members):
    values, valid = zip(*members, strict=True)
    got = group_advantages(values, valid)
    kept = [score for score, ok in members if ok]
    assert np.array_equal(got[np.array(valid)], group_advantages(kept, [True] * len(kept)))
    assert (got[~np.array(valid)] == 0).all()
    assert abs(got.sum()) < 1e-6


def test_the_formula():
    got = group_advantages([0.0, 1.0, 1.0, 0.0, float("nan")], [True, True, True, True, False])
    assert got.tolist() == pytest.approx([-1, 1, 1, -1, 0], abs=1e-5)


def test_no_spread_teaches_nothing():
    # 0.1 three times has a standard deviation above 0 in floating point.
    assert group_advantages([0.1, 0.1, 0.1], [True] * 3).tolist() == [0, 0, 0]
    assert group_advantages([0.7, 0.2], [True, False]).tolist() == [0, 0]


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([float("nan"), 1.0], [True, True])
    with pytest.raises(ValueError, match="2 scores for 1"):
        group_advantages([0.0, 1.0], [True])
