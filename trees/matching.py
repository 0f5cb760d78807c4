"""Which recorded node a request continues: a pure index of message boundaries.

A harness sends its whole history with every call. A *boundary* is the place after a message (or after the head: system prompt
and tools) where a recorded node ends. Boundaries are keyed by a hash chain, `digest(parent digest, canonical message bytes)`, so
equal histories meet at equal digests whatever they contain. The caller makes messages canonical and restores original payloads
first; here digests are compared and nothing is parsed.

Invariants: `deepest` returns the *deepest* recorded boundary that is a prefix of the request; a boundary that several messages share
one node with needs no entry of its own. What was recorded last under a digest wins: after a retry the harness goes on
from the answer that it got last. Boundaries are visible to their own execution only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Match:
    """A boundary: after the head and `depth` messages. `node` ends there (-1: nothing recorded, hang off the root)."""

    depth: int
    node: int
    digest: bytes


def chain(digest: bytes, message: bytes) -> bytes:
    """The digest (16 bytes) of the boundary one message after the boundary `digest`. The head's own is `chain(b"", head)`."""
    return blake3(digest + len(message).to_bytes(8, "little") + message).digest(DIGEST_BYTES)


class MessageIndex:
    """Boundaries of all live executions of one gateway. No I/O, no clock; not thread-safe."""

    def __init__(self) -> None:
        self._own: dict[int, dict[bytes, int]] = {}

    def deepest(self, execution: int, digests: Sequence[bytes]) -> Match:
        """The deepest recorded boundary of a request, by the digests of all its boundaries, the head's first. With nothing recorded:
        depth 0, node -1 and the head's digest; depth 0 with a node: only the head is known. O(boundaries behind the one found)."""
        known = self._own.get(execution, {})
        for depth in range(len(digests) - 1, -1, -1):
            node = known.get(digests[depth])
            if node is not None:
                return Match(depth, node, digests[depth])
        return Match(0, -1, digests[0])

    def restore(self, execution: int, boundary: Match) -> None:
        """Record a boundary. Raises ValueError for one without a node."""
        if boundary.node < 0 or len(boundary.digest) != DIGEST_BYTES:
            raise ValueError(f"a boundary needs a node and a digest of {DIGEST_BYTES} bytes: {boundary}")
        self._own.setdefault(execution, {})[boundary.digest] = boundary.node

    def drop(self, execution: int, boundary: Match) -> None:
        """Nobody goes on from this node any more; without effect where another one was recorded under the digest meanwhile."""
        known = self._own.get(execution, {})
        if known.get(boundary.digest) == boundary.node:
            del known[boundary.digest]

    def forget(self, execution: int) -> None:
        """Drop the boundaries of an execution that has ended."""
        self._own.pop(execution, None)

    def __len__(self) -> int:
        """Boundaries held now."""
        return sum(len(known) for known in self._own.values())
