"""A prompt in parts is its ids, and its JSON is that of a plain list."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.engines.prompt import Prompt, Run, extended, request_json

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)
REST = {"sampling": {"stop": [1]}, "stream": True}


def prompt(parts: list[list[int]]) -> Prompt:
    return Prompt([Run(np.asarray(part, np.int32)) for part in parts])


@given(st.lists(ids, max_size=6), st.lists(st.integers(0, 99), max_size=3))
def test_parts_are_a_sequence_and_its_json(parts: list[list[int]], more: list[int]) -> None:
    plain = [token for part in parts for token in part]
    made = prompt(parts)
    assert made == plain
    assert len(made) == len(plain)
    assert [*made] == plain
    assert made[1:3] == plain[1:3]
    assert made[-1:] == plain[-1:]
    for _ in range(2):
        assert orjson.loads(request_json("token_ids", made, REST)) == {"token_ids": plain, **REST}
        for run in made.runs:
            run.forget()
    longer = extended(made, more)
    assert longer == [*plain, *more]
    assert request_json("a", longer, REST) == request_json("a", extended(plain, more), REST) == orjson.dumps({"a": [*plain, *more], **REST})
    assert made == plain, "what was extended is as it was"


def test_one_id_is_an_int() -> None:
    made = prompt([[5, 6], [7]])
    assert (made[0], made[2], made[-1], type(made[1])) == (5, 7, 7, int)
    with pytest.raises(IndexError):
        made[3]


def test_a_part_is_written_once() -> None:
    run = Run(np.asarray([1, 2], np.int32))
    assert run.text is run.text
    assert run.forget() == 3
    assert run.forget() == 0
