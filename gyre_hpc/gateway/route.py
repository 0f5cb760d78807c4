"""A route, which is an engine as calls see it, and a call, which outlives the routes that it runs on.

Invariant: a call that runs on a route stands in the route's `calls` and, by its execution, in `executions`, and names the route; the floor
(floor.py) writes all three together. Neither has a clock of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_hpc.engines.handover import Departure, KvLink
from gyre_hpc.engines.prompt import extended
from gyre_hpc.engines.protocol import EngineAddress, EngineClient, GenerateRequest, Ids, TokenChunk

SEATS = 1024
"""Engines that one cell may have: a route's number is its cell times this, plus the engine's, so that later cells have higher ones."""


@dataclass(eq=False)
class Route:
    seat: int
    """Cell and engine in one number."""
    address: EngineAddress
    client: EngineClient
    link: KvLink | None
    open: bool = False
    draining: bool = False
    """Closed, and what is in flight still runs here."""
    calls: set[Call] = field(default_factory=set)
    executions: Counter[int] = field(default_factory=Counter)
    """Calls in flight here per execution; its size is what capacity limits."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0
    faults: int = 0
    """In a row, without a token in between."""
    not_before: float = 0.0
    departure: Departure | None = None
    """While it closes and its engine hands over KV."""

    @property
    def cell(self) -> int:
        return self.seat // SEATS

    def load(self, homes: Counter[int]) -> float:
        """Executions that live there (`homes`: how many by seat) or call it now, relative to what it holds."""
        return max(homes[self.seat], len(self.executions)) / self.address.capacity


@dataclass(eq=False)
class Call:
    request: GenerateRequest
    execution: int
    number: int
    """Order of arrival."""
    output: asyncio.Queue[TokenChunk | BaseException] = field(default_factory=asyncio.Queue)
    parts: list[Ids] = field(default_factory=list)
    """What was sampled, as it came."""
    sampled: int = 0
    """Tokens of all parts."""
    route: Route | None = None
    attempt: asyncio.Task[None] | None = None
    granted: asyncio.Future[Route] | None = None
    held: bool = False
    """It waits until its cell's KV may be handed over."""
    moving: bool = False
    """It has lost a route and continues elsewhere."""
    origin: Route | None = None
    """Whose engine has its KV: the last that sampled for it, or for what it goes on from."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Since its last route closed it has sampled elsewhere, or ended."""
    faults: int = 0

    def path(self) -> Sequence[int]:
        """The prompt, and what was sampled behind it."""
        return extended(self.request.prompt, np.concatenate(self.parts)) if self.parts else self.request.prompt
