"""Conversations that wait for a tool, and at which engine their KV lies: what a cell that leaves has to hand over beside calls in flight.

Ordering key: the last to end comes first. Invariants: a conversation that goes on waits no longer, so of a conversation's calls only the
last one's end is here; at most `KEPT` of an execution (side queries end and never go on); a cell that lost its KV has none. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_hpc.engines.prompt import Prompt, Tokens

KEPT = 4


@dataclass(frozen=True, eq=False)
class Conversation:
    """All its tokens, and the cell whose engine cached them."""

    execution: int
    cell: int
    tokens: Sequence[int]
    number: int


class WaitingConversations:
    """Of all executions."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Conversation]] = {}
        self._ended = 0

    def begin(self, execution: int, prompt: Sequence[int]) -> int | None:
        """A call of this execution begins: what it goes on from waits no longer. The cell that has most of its KV."""
        kept = self._kept.get(execution)
        if not kept:
            return None
        ids = _array(prompt)
        before = [c for c in kept if len(c.tokens) <= len(ids) and np.array_equal(_array(c.tokens), ids[: len(c.tokens)])]
        self._kept[execution] = [c for c in kept if c not in before]
        return max(before, key=lambda c: len(c.tokens)).cell if before else None

    def end(self, execution: int, cell: int, tokens: Sequence[int]) -> None:
        """A call has ended with these tokens, prompt and output, at this cell's engine."""
        self._ended += 1
        kept = self._kept.setdefault(execution, [])
        kept.append(Conversation(execution, cell, tokens, self._ended))
        del kept[:-KEPT]

    def leave(self, cell: int) -> list[Conversation]:
        """Those whose KV lies at this cell, the last to end first; they are here no longer."""
        gone: list[Conversation] = []
        for execution, kept in list(self._kept.items()):
            gone += (c for c in kept if c.cell == cell)
            stay = [c for c in kept if c.cell != cell]
            if stay:
                self._kept[execution] = stay
            else:
                del self._kept[execution]
        return sorted(gone, key=lambda c: -c.number)

    def forget(self, execution: int) -> None:
        """An execution has ended."""
        self._kept.pop(execution, None)


def _array(tokens: Sequence[int]) -> Tokens:
    return tokens.array() if isinstance(tokens, Prompt) else np.asarray(tokens, np.int32)
