"""What the policy samples in one call: tokens for the record, pieces for the harness.

Invariant: pieces from the first tool call on are held until `complete`; so nothing that can be acted upon is shown before it is durable.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gyre_hpc.engines.protocol import EngineFault, TokenChunk, joined
from gyre_hpc.gateway.calls import CallStream, Ended, Event
from gyre_hpc.gateway.dialects.canonical import Message, normalise_message
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.toolcalls import Piece, PieceParser, ToolCallParser, ToolPiece, blocks_of


class Turn:
    """What the policy samples in one call, as tokens for the record and as pieces for the harness, read by `parser` (none: Hermes)."""

    def __init__(self, call: int, node: int, renderer: TurnRenderer, stream: CallStream, parser: PieceParser | None = None) -> None:
        self.call = call
        self.node = node
        self.stream = stream
        self.count = 0
        """Tokens that were taken."""
        self.finish = "cancelled"
        self.fault: Exception | None = None
        self._parts: list[TokenChunk] = []
        self._decoder = renderer.decoder()
        self._parser = parser or ToolCallParser(f"toolu_{call:08x}", renderer.opens_thought)
        self._pieces: list[Piece] = []
        self._held: list[Event] = []
        self._rest: list[Piece] | None = None

    def take(self, chunk: TokenChunk) -> None:
        """More tokens: recorded later, shown now unless a tool call began. Raises EngineFault for versions of tokens that never came."""
        self._parts.append(chunk)
        self.count += len(chunk)
        if chunk.exact is not None:
            self._set_versions(chunk)
        if chunk.finish is not None:
            self.finish = chunk.finish
        self.stream.push(*self._releasable(self._parser.feed(self._decoder.feed(chunk.tokens))))

    def _set_versions(self, last: TokenChunk) -> None:
        exact, whole = last.exact, joined(self._parts)
        if exact is None or not len(exact):
            return
        if len(exact) > self.count:
            raise EngineFault(f"the engine told the versions of {len(exact)} tokens, it sent {self.count}")
        self._parts = [replace(whole, versions=np.concatenate([whole.versions[: -len(exact)], exact]), exact=None)]

    def sampled(self) -> TokenChunk:
        """All tokens that were taken, at least one."""
        self._parts = [joined(self._parts)]
        return self._parts[0]

    def read(self) -> list[Piece]:
        """The pieces that are left, once no token comes any more. May be called beside the event loop first; later calls give the same."""
        if self._rest is None:
            self._rest = [*self._parser.feed(self._decoder.finish()), *self._parser.finish(self.finish == "length")]
        return self._rest

    def complete(self) -> tuple[list[Event], Message]:
        """The events that are left, `Ended` last, and the answer as the harness has it then."""
        released = self._releasable(self.read())
        called = any(isinstance(piece, ToolPiece) for piece in self._pieces)
        reason = "max_tokens" if self.finish == "length" else "tool_use" if called else "end_turn"
        return [*released, *self._held, Ended(reason, self.count)], normalise_message("assistant", list(blocks_of(self._pieces)))

    def _releasable(self, pieces: list[Piece]) -> list[Piece]:
        self._pieces += pieces
        for at, piece in enumerate(pieces):
            if self._held or isinstance(piece, ToolPiece):
                self._held += pieces[at:]
                return pieces[:at]
        return pieces
