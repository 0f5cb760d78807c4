import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trees.ids import AnyOf, Ids


@given(st.lists(st.integers(-3, 40)), st.lists(st.integers(-3, 40)))
def test_a_set_of_ids_is_the_set_in_any_order_and_its_intervals_are_the_fewest(first, second):
    ids, want = Ids(), set()
    for value in first:
        ids.add(value)
        want.add(value)
        assert all(a[1] + 1 < b[0] for a, b in zip(ids.spans, ids.spans[1:], strict=False))
    assert list(ids) == sorted(want)
    assert len(ids) == len(want)
    assert [value in ids for value in range(-5, 45)] == [value in want for value in range(-5, 45)]
    assert [np.int64(value) in ids for value in range(-5, 45)] == [value in want for value in range(-5, 45)]
    both = ids.union(second)
    assert list(both) == sorted(want | set(second))
    assert list(ids) == sorted(want)
    assert Ids(both.spans) == both == Ids.of([*first, *second])
    assert [value in AnyOf(ids, second) for value in range(-5, 45)] == [value in both for value in range(-5, 45)]


def test_intervals_that_overlap_are_refused():
    for spans in ([(0, 3), (3, 4)], [(2, 1)], [(4, 5), (0, 1)]):
        with pytest.raises(ValueError, match="do not ascend"):
            Ids(spans)
