"""What comes at once is one chunk, and nothing of it is lost or moved."""

from __future__ import annotations

import random

from gyre_hpc.engines.protocol import EngineFault, TokenChunk, merged


def test_chunks_are_one_up_to_what_is_none() -> None:
    fault = EngineFault("gone")
    one, two = TokenChunk([1], [-1.0], [3]), TokenChunk([2, 4], [-2.0, -4.0], [3, 5])
    last = TokenChunk([6], [-6.0], [5], "stop", [3, 5, 5, 5])
    assert merged([one]) == [one]
    assert merged([one, two, fault]) == [TokenChunk([1, 2, 4], [-1.0, -2.0, -4.0], [3, 3, 5]), fault]
    assert merged([fault, one]) == [fault, one]
    assert merged([one, two, last]) == [TokenChunk([1, 2, 4, 6], [-1.0, -2.0, -4.0, -6.0], [3, 3, 5, 5], "stop", [3, 5, 5, 5])]
    assert one.tokens.tolist() == [1], "what was merged is as it was"


def test_any_chunks_say_the_same() -> None:
    rng = random.Random(1)
    for _ in range(50):
        chunks = [
            TokenChunk([rng.randrange(9)] * n, [-float(n)] * n, [n] * n) for n in (rng.randrange(3) for _ in range(rng.randrange(1, 9)))
        ]
        (found,) = merged(chunks)
        assert isinstance(found, TokenChunk)
        assert found.tokens.tolist() == [token for chunk in chunks for token in chunk.tokens.tolist()]
        assert found.logprobs.tolist() == [value for chunk in chunks for value in chunk.logprobs.tolist()]
        assert found.versions.tolist() == [version for chunk in chunks for version in chunk.versions.tolist()]
