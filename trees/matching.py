"""Which recorded node a request continues: a pure index of message boundaries.

A harness sends its whole history with every call. A *boundary* is the place after a message (or after the head: system prompt
and tools) where a recorded node ends. Boundaries are keyed by a hash chain, `digest(parent digest, canonical message bytes)`, so
equal histories meet at equal digests whatever they contain. The caller makes messages canonical and restores original payloads
first; here bytes are compared and nothing is parsed.

Invariants: `match` returns the *deepest* recorded boundary that is a prefix of the request; a boundary that several messages share
one node with needs no entry of its own. What was recorded last under a digest wins: after a retry the harness goes on
from the answer that it got last. Boundaries are visible to their own execution only, but for those added as `shared`
(system, tools, task: no sampled token on the path), which every execution sees; its own come first at equal depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def boundaries(head: bytes, messages: Sequence[bytes]) -> Iterator[bytes]:
    """The 1 + len(messages) digests after the head and after each message."""
    digest = chain(b"", head)
    yield digest
    for message in messages:
        digest = chain(digest, message)
        yield digest


class MessageIndex:
    """Boundaries of all live executions of one gateway. No I/O, no clock; not thread-safe."""

    def __init__(self) -> None:
        self._own: dict[int, dict[bytes, int]] = {}
        self._shared: dict[bytes, int] = {}

    def match(self, execution: int, head: bytes, messages: Sequence[bytes]) -> Match:
        """The deepest recorded boundary of this request. With nothing recorded: depth 0, node -1 and the head's digest.

        `head`: canonical bytes of system prompt and tools; `messages`: canonical bytes of each message, oldest first. depth 0 with a
        node: only the head is known. O(bytes of the request).
        """
        return self.deepest(execution, list(boundaries(head, messages)))

    def deepest(self, execution: int, digests: Sequence[bytes]) -> Match:
        """Like `match`, by the digests of all boundaries of the request, which are at least one. O(boundaries behind the one found)."""
        own = self._own.get(execution, {})
        for depth in range(len(digests) - 1, -1, -1):
            node = own.get(digests[depth], self._shared.get(digests[depth]))
            if node is not None:
                return Match(depth, node, digests[depth])
        return Match(0, -1, digests[0])

    def add(self, execution: int, at: Match, messages: Sequence[bytes], node: int, *, shared: bool = False) -> Match:
        """Record that `node` ends `messages` further than the boundary `at`; returns the new boundary, to go on from.

        `messages` empty: `node` ends at `at` itself (the head). `shared`: visible to all executions; only for nodes
        without a sampled token on their path. The boundaries in between stay unrecorded.
        """
        digest = at.digest
        for message in messages:
            digest = chain(digest, message)
        return self.restore(execution, Match(at.depth + len(messages), node, digest), shared=shared)

    def restore(self, execution: int, boundary: Match, *, shared: bool = False) -> Match:
        """Record a boundary as it is (one that was kept elsewhere, or computed with `chain`)."""
        if boundary.node < 0 or len(boundary.digest) != DIGEST_BYTES:
            raise ValueError(f"a boundary needs a node and a digest of {DIGEST_BYTES} bytes: {boundary}")
        table = self._shared if shared else self._own.setdefault(execution, {})
        table[boundary.digest] = boundary.node
        return boundary

    def drop(self, execution: int, boundary: Match) -> None:
        """Nobody goes on from this node any more; without effect where another one was recorded under the digest meanwhile."""
        own = self._own.get(execution, {})
        if own.get(boundary.digest) == boundary.node:
            del own[boundary.digest]

    def forget(self, execution: int) -> None:
        """Drop the boundaries of an execution that has ended (shared ones stay)."""
        self._own.pop(execution, None)

    def __len__(self) -> int:
        """Boundaries held now."""
        return len(self._shared) + sum(len(own) for own in self._own.values())
