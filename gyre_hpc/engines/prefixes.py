"""KV of calls that ended, found again by token prefix: the next turn of a conversation prefills only what is new.

Invariants: a hit is verified token by token (hashes only find candidates); entries belong to one weight version, `clear` is called with
every update; the least recently used entries go first when `limit` bytes are exceeded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_hpc.engines.slots import KV

BLOCK = 16
"""Tokens per hashed block: prefixes shorter than one block are not worth a look-up."""


@dataclass(frozen=True)
class _Entry:
    tokens: npt.NDArray[np.int64]
    kv: KV
    size: int


class PrefixCache:
    """An LRU of (tokens, KV)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_block: dict[int, int] = {}
        self._next = 0
        self.size = 0
        self.hits = 0

    def put(self, tokens: Sequence[int], kv: KV) -> None:
        """Keep the KV of `tokens` (one column each); takes over the tensors."""
        size = sum(k.nbytes + v.nbytes for k, v in kv)
        if size > self._limit or len(tokens) < BLOCK:
            return
        number, self._next = self._next, self._next + 1
        self._entries[number] = _Entry(np.asarray(tokens, dtype=np.int64), kv, size)
        self.size += size
        for key in _block_keys(tokens):
            self._by_block[key] = number
        while self.size > self._limit:
            self._drop(next(iter(self._entries)))

    def longest(self, tokens: Sequence[int]) -> tuple[KV, int] | None:
        """The stored KV that shares the longest prefix with `tokens`, and that prefix's length, at most len(tokens) - 1."""
        best: int | None = None
        for key in _block_keys(tokens):
            number = self._by_block.get(key)
            if number is None:
                break
            best = number
        if best is None:
            return None
        entry = self._entries[best]
        limit = min(len(tokens) - 1, len(entry.tokens))
        differ = np.flatnonzero(entry.tokens[:limit] != np.asarray(tokens[:limit], dtype=np.int64))
        length = int(differ[0]) if len(differ) else limit
        if length == 0:
            return None
        self._entries.move_to_end(best)
        self.hits += 1
        return entry.kv, length

    def clear(self) -> None:
        self._entries.clear()
        self._by_block.clear()
        self.size = 0

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self.size -= entry.size
        for key in _block_keys(entry.tokens.tolist()):
            if self._by_block.get(key) == number:
                del self._by_block[key]


def _block_keys(tokens: Sequence[int]) -> Iterator[int]:
    """A hash of each prefix of whole blocks, shortest first."""
    key = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        yield key
