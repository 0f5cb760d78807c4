"""First prompts, made once for all who begin alike: the executions of a group send the same system prompt, tools and task.

Invariant: what is given is what the renderer makes of this conversation; equal digests (canonical.py) mean equal prompts as long as no turn
of the policy is among them, so only those are kept. Bounded by tokens, the one that was used longest ago goes first. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.gateway.dialects.canonical import Conversation
from gyre_hpc.gateway.text.template import TurnRenderer

KEPT_TOKENS = 1 << 22
"""Tokens that are kept in all (4 bytes each)."""


class Roots:
    """Prompts of which nothing is recorded yet, cut where executions may share (TurnRenderer.split)."""

    def __init__(self, renderer: TurnRenderer, limit: int = KEPT_TOKENS) -> None:
        self._renderer, self._limit = renderer, limit
        self._kept: OrderedDict[bytes, list[NDArray[np.int32]]] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def of(self, conversation: Conversation) -> list[NDArray[np.int32]]:
        """int32 arrays, one for each node to come. Raises ValueError (template)."""
        if any(turn.role == "assistant" for turn in conversation.messages):
            return self._made(conversation)
        key = conversation.digests[-1]
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._made(conversation)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._tokens += sum(map(len, made))
            while self._tokens > self._limit:
                _, old = self._kept.popitem(last=False)
                self._tokens -= sum(map(len, old))
        return made

    def _made(self, conversation: Conversation) -> list[NDArray[np.int32]]:
        return [np.asarray(part, np.int32) for part in self._renderer.split(self._renderer.root(conversation))]
