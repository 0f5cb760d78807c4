"""The prefix cache finds the longest shared prefix and nothing else, within its limit."""

from __future__ import annotations

import random

import torch

from gyre_hpc.engines.prefixes import BLOCK, PrefixCache
from gyre_hpc.engines.slots import KV


def _kv(tokens: list[int]) -> KV:
    column = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
    return [(column, column + 0.5)]


def test_hits_are_true_prefixes_and_at_least_whole_blocks() -> None:
    rng = random.Random(0)
    for _ in range(30):
        cache = PrefixCache(1 << 20)
        stored: list[list[int]] = []
        for _ in range(8):
            base = rng.choice(stored)[: rng.randrange(60)] if stored and rng.random() < 0.7 else []
            tokens = base + [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
            stored.append(tokens)
            cache.put(tokens, _kv(tokens))
            query = rng.choice(stored)[: rng.randrange(1, 80)] + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
            best = max(sum(1 for _ in _shared(query, s)) for s in stored if len(s) >= BLOCK) if any(len(s) >= BLOCK for s in stored) else 0
            hit = cache.longest(query)
            found = hit[1] if hit else 0
            assert found <= min(best, len(query) - 1)
            assert found >= min(best, len(query) - 1) // BLOCK * BLOCK
            if hit:
                assert hit[0][0][0][:found, 0, 0].tolist() == query[:found]


def _shared(a: list[int], b: list[int]):  # type: ignore[no-untyped-def]
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_the_oldest_goes_first_and_clear_forgets() -> None:
    tokens = [[n] * BLOCK for n in range(4)]
    size = sum(k.nbytes + v.nbytes for k, v in _kv(tokens[0]))
    cache = PrefixCache(3 * size)
    for t in tokens[:3]:
        cache.put(t, _kv(t))
    assert cache.longest([*tokens[0], 9]) is not None
    cache.put(tokens[3], _kv(tokens[3]))
    assert cache.size == 3 * size
    assert [cache.longest([*t, 9]) is not None for t in tokens] == [True, False, True, True]
    cache.clear()
    assert cache.size == 0
    assert cache.longest([*tokens[0], 9]) is None
