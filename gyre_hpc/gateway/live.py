"""What a recorder holds of one execution while it lives.

Invariant: a prompt costs the nodes that the path of the call before does not have; whatever the context's length, nothing in it is
walked, copied or written as JSON again. Tokens are those of the store (4 bytes each); their JSON (6 bytes) can be dropped and comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.engines.prompt import Prompt, Run
from gyre_hpc.gateway.calls import CallStream
from gyre_hpc.gateway.dialects.bodies import Memory
from gyre_hpc.gateway.reservations import Reservations
from gyre_hpc.gateway.roles import History
from trees.records import CallEnd
from trees.tree import Call

Tokens = NDArray[np.int32]
TEXTS = 1 << 29
"""Bytes that are kept for all executions together: the JSON of their prompts, and their last bodies."""
TEXT_BYTES = 12
"""Bytes of a token, about: 7 of JSON, and its text in the body."""


@dataclass
class Live:
    """What is held of one execution while it lives."""

    execution: int
    calls: int = 0
    tokens: int = 0
    warnings: int = 0
    faulted: bool = False
    """The last call that was not cancelled broke on our side."""
    reserved: Reservations = field(default_factory=Reservations)
    """Tokens that calls in flight may still sample, where there is a cap."""
    history: History = field(default_factory=History)
    streams: dict[bytes, CallStream] = field(default_factory=dict)
    """By the request's digest: calls in flight, and the last that are over."""
    delivered: dict[bytes, Call] = field(default_factory=dict)
    """By the request's digest: calls whose answer was delivered."""
    silent: dict[bytes, CallEnd] = field(default_factory=dict)
    """Of those the ones that are superseded when they are asked again: they said nothing (or see resume.py)."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    nodes: dict[int, tuple[int, Tokens]] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    """Tokens of the nodes, with their JSON."""
    memory: Memory = field(default_factory=Memory)
    """What is known of its requests' bodies."""
    trunk: tuple[int, list[Run], int] = (-1, [], 0)
    """The path of the last call: its last node, the runs from the root, their tokens."""

    def prompt(self, node: int, more: Sequence[Run] = ()) -> Prompt:
        """The path from the root to the end of `node`, and what comes behind it. O(nodes that the last path did not have)."""
        runs: list[Run] = []
        above, known, length = self.trunk
        while node >= 0 and node != above:
            parent, tokens = self.nodes[node]
            run = self.runs.get(node) or self.runs.setdefault(node, Run(tokens))
            runs.append(run)
            node = parent
        if node < 0:
            known, length = [], 0
        path = [*known, *reversed(runs), *more]
        return Prompt(path, length + sum(len(run.tokens) for run in path[len(known) :]))

    def forget_texts(self) -> None:
        """Drop the JSON of all runs, and the last body."""
        for run in self.runs.values():
            run.forget()
        self.memory.last = None


class Texts:
    """Bounds what the texts of all live executions take: those that asked last keep theirs."""

    def __init__(self, limit: int = TEXTS) -> None:
        """`limit`: bytes."""
        self._limit = limit
        self._sizes: dict[int, int] = {}

    def used(self, live: Live, tokens: int, others: Mapping[int, Live]) -> None:
        """A prompt of `tokens` was written for `live`; the texts of `others`, longest unused first, go where there is no room for all."""
        self._sizes.pop(live.execution, None)
        self._sizes[live.execution] = TEXT_BYTES * tokens
        total = sum(self._sizes.values()) if len(self._sizes) > 1 else 0
        for old in [*self._sizes][:-1]:
            if total <= self._limit:
                return
            total -= self._sizes.pop(old)
            if old in others:
                others[old].forget_texts()
