"""Synthetic tokens for recordings that have none: a function of (run, offset) and nothing else.

The first token of a run is `VOCABULARY + run`, the others lie in [0, VOCABULARY) and look random. So two runs never begin alike, and two
paths are equal exactly as far as they lead through the same runs. They can't be decoded, and compress worse than text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 1 << 17


def tokens_of(pieces: Sequence[tuple[int, int, int]]) -> NDArray[np.int32]:
    """The tokens of these (run, from, to), joined: int32[T]."""
    runs, offsets = _places(pieces)
    ids = (_mix(runs, offsets) >> np.uint64(40)) % np.uint64(VOCABULARY)
    return np.where(offsets == 0, VOCABULARY + runs, ids.astype(np.int64)).astype(np.int32)


def logprobs_of(pieces: Sequence[tuple[int, int, int]]) -> NDArray[np.float32]:
    """Made-up log-probs in (-1, 0] of the same tokens, so that a column of them costs what a real one does: float32[T]."""
    return -(_mix(*_places(pieces)) & np.uint64(0xFFFFFF)).astype(np.float32) / np.float32(1 << 24)


def _places(pieces: Sequence[tuple[int, int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Run and offset of every token."""
    table = np.array(pieces, np.int64).reshape(-1, 3)
    lengths = table[:, 2] - table[:, 1]
    starts = np.cumsum(lengths) - lengths
    return np.repeat(table[:, 0], lengths), np.arange(lengths.sum()) - np.repeat(starts - table[:, 1], lengths)


def _mix(runs: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of each pair (splitmix64's finalizer: Steele, Lea, Flood 2014)."""
    bits: NDArray[np.uint64] = runs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offsets.astype(np.uint64) * np.uint64(
        0xD1B54A32D192ED03
    )
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
