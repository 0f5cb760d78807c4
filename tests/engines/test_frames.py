"""Frames say what was framed, wherever the network cuts them, and no bytes make anything but chunks and an EngineFault."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.engines.frames import ALIVE, LIMIT, Frames, fault, frame
from gyre_hpc.engines.protocol import EngineFault, TokenChunk, joined, merged
from gyre_hpc.engines.streaming import sound

TOKEN = st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32), st.sampled_from([0, 1, 7]))
CHUNK = st.lists(TOKEN, max_size=9).map(lambda rows: TokenChunk(*([row[i] for row in rows] for i in range(3))))


def fed(data: bytes, cuts: list[int]) -> tuple[TokenChunk, str]:
    """All that was read of these bytes, cut at these places, up to a `finish` or a fault; and the fault."""
    reader, found = Frames(), [TokenChunk([], [], [])]
    for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True):
        for item in reader.feed(data[first:last]):
            if isinstance(item, EngineFault):
                return joined(found), str(item)
            found.append(sound(item))
            if item.finish is not None:
                return joined(found), ""
    return joined(found), ""


@settings(max_examples=60, deadline=None)
@given(st.lists(CHUNK, min_size=1, max_size=6), st.sampled_from(["stop", "length"]), st.randoms())
def test_any_cut_gives_what_was_framed(chunks: list[TokenChunk], finish: str, rng: random.Random) -> None:
    ended = TokenChunk([5], [-0.5], [2], finish)
    data = ALIVE + b"".join(map(frame, chunks)) + ALIVE + frame(ended) + frame(TokenChunk([6], [-1.0], [2]))
    cuts = sorted(rng.sample(range(1, len(data)), rng.randrange(6)))
    assert fed(data, cuts) == (joined([*chunks, ended]), "")
    assert merged(Frames().feed(data)) == [joined([*chunks, ended])], "what comes at once is one chunk"


@settings(max_examples=60, deadline=None)
@given(st.lists(CHUNK, min_size=1, max_size=4), st.text("aé😀", max_size=20), st.randoms())
def test_what_stands_before_a_fault_is_given_first(chunks: list[TokenChunk], text: str, rng: random.Random) -> None:
    for wrong, why in ((fault(text), text), (b"HTTP/1.1 502 Bad Gateway" + ALIVE, "no frame")):
        data = b"".join(map(frame, chunks)) + wrong
        found, told = fed(data, sorted(rng.sample(range(1, len(data)), rng.randrange(4))))
        assert found == joined([TokenChunk([], [], []), *chunks])
        assert why.encode(errors="replace").decode() in told


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_chunks_or_a_fault(data: bytes, cut: int) -> None:
    cut = min(cut, len(data))
    try:
        found, told = fed(data, [cut])
    except EngineFault:
        return
    assert len(found.tokens) == len(found.logprobs) == len(found.versions)
    assert len(found) == 0 or told or len(data) >= 16


@settings(max_examples=60, deadline=None)
@given(CHUNK, st.integers(0, 15), st.integers(0, 255), st.binary(max_size=8))
def test_a_head_that_was_changed_is_a_fault_or_waits(chunk: TokenChunk, at: int, value: int, more: bytes) -> None:
    data = bytearray(frame(chunk) + more)
    data[at] = value
    try:
        found, _ = fed(bytes(data), [])
    except EngineFault:
        return
    assert len(found) <= len(chunk)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ((1, 0, 0, LIMIT + 8, 1, LIMIT // 8), "no frame"),
        ((1, 0, 0, 24, 1, 1), "no frame"),
        ((1, 3, 0, 16, 1, 1), "no frame"),
        ((3, 0, 0, 0, 0, 0), "no frame"),
        ((0, 0, 0, 8, 0, 0), "no frame"),
        ((1, 0, 0, 16, 1, 1), "versions for 9"),
    ],
)
def test_a_head_that_says_what_cannot_be_is_refused_at_once(head: tuple[int, ...], why: str) -> None:
    (told,) = Frames().feed(struct.pack("<BBHIII", *head) + struct.pack("<Ii", 9, 1) + bytes(8))
    assert isinstance(told, EngineFault)
    assert why in str(told)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_log_probs_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(EngineFault, match="finite"):
        fed(frame(TokenChunk([1, 2], [-1.0, value], [0, 0])), [])
    with pytest.raises(EngineFault, match="below 0"):
        fed(frame(TokenChunk([1, -2], [-1.0, -1.0], [0, 0])), [])


def test_log_probs_and_ids_are_exact() -> None:
    rng = np.random.default_rng(0)
    tokens, logprobs = rng.integers(0, 2**31 - 1, 5000, np.int32), -rng.random(5000, np.float32)
    chunk = TokenChunk(tokens, logprobs, np.repeat([3, 4], [4000, 1000]).astype(np.int32), "length")
    data = frame(chunk)
    assert fed(data, list(range(1, len(data), 999))) == (chunk, "")
    assert len(data) == 16 + 2 * 8 + 8 * 5000
