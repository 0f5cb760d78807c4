"""A fake engine for hand-overs: client and link in one, with vLLM's silent failures built in.

Token i is a checksum of all before it and the weight version. A pull that vLLM would answer with wrong KV (after the lease, for another
prompt, under other weights) is answered here with `WRONG` tokens, and what is computed after it from its cache is wrong as well.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from gyre_hpc.engines.handover import Counters, Gone
from gyre_hpc.engines.protocol import Doubt, EngineFault, GenerateRequest, Ticket, TokenChunk

WRONG = 10_000
BLOCK = 4


def next_token(tokens: Sequence[int], version: int) -> int:
    """What a sound engine samples after these."""
    return zlib.crc32(np.asarray([*tokens, version], np.int64).tobytes()) % 1000


def undisturbed(prompt: Sequence[int], n: int, version: int = 0) -> list[int]:
    """n tokens of a sound engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens, version))
    return tokens[len(prompt) :]


@dataclass
class Pin:
    tokens: list[int]
    version: int
    expires: float


@dataclass(eq=False)
class FakeEngine:
    """`peers`: all engines by name, itself included. Delays in seconds; `broken`: every call fails, `gone`: nothing listens."""

    name: str
    peers: dict[str, FakeEngine]
    patience: float = 0.4
    lease: float = 1.2
    step: float = 0.002
    version: int = 0
    pin_delay: float = 0.0
    pull_delay: float = 0.0
    pinned_short: int = 0
    broken: bool = False
    gone: bool = False
    pins: dict[int, Pin] = field(default_factory=dict)
    cache: dict[tuple[int, ...], bool] = field(default_factory=dict)
    """Prefix -> whether its KV is right."""
    sampled: int = 0
    computed: int = 0
    cached: int = 0
    pulled: int = 0
    forgotten: int = 0
    unpinned: int = 0
    live: set[str] = field(default_factory=set)
    numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.peers[self.name] = self

    # the client

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.broken:
            raise EngineFault(f"{self.name} is broken")
        if request.ticket is not None:
            request.ticket.check(request.prompt, time.monotonic())
            if request.ticket.version != self.version:  # the guard's part
                raise Doubt("version", "other weights")
        tokens = list(request.prompt)
        self.live.add(request.request_id)
        try:
            right = await self._pull(request.ticket, tokens) if request.ticket is not None else self._prefill(tokens)
            for i in range(request.sampling.max_tokens):
                await asyncio.sleep(self.step)
                if self.broken:
                    raise EngineFault(f"{self.name} broke")
                token = next_token(tokens, self.version) if right else WRONG
                tokens.append(token)
                self.sampled += 1
                self._cache(tokens, right)
                yield TokenChunk([token], [-1.0], [self.version], "length" if i + 1 == request.sampling.max_tokens else None)
        finally:
            self.live.discard(request.request_id)

    async def close(self) -> None:
        pass

    # the link

    async def pin(self, tokens: Sequence[int]) -> Ticket:
        asked = time.monotonic()
        await asyncio.sleep(self.pin_delay)
        if self.broken:
            raise EngineFault(f"{self.name} is broken")
        self._prefill(list(tokens))
        number = next(self.numbers)
        self.pins[number] = Pin(list(tokens), self.version, time.monotonic() + self.lease)
        ticket = Ticket(tokens, self.version, asked + self.patience, {"engine": self.name, "number": number})
        if self.pinned_short:
            await self.unpin(ticket)
            raise Doubt("length", "not all of it")
        return ticket

    async def unpin(self, ticket: Ticket) -> None:
        self.unpinned += self.pins.pop(ticket.params["number"], None) is not None

    async def forget(self) -> None:
        if self.gone:
            raise Gone(f"{self.name} is gone")
        if self.broken:
            raise EngineFault(f"{self.name} is broken")
        self.forgotten += 1
        self.cache.clear()

    async def counters(self) -> Counters:
        return Counters(self.computed, self.cached, self.pulled, self.pulled * 100)

    async def block(self) -> int:
        return BLOCK

    # inside

    async def _pull(self, ticket: Ticket, tokens: list[int]) -> bool:
        await asyncio.sleep(self.pull_delay)
        source = self.peers[ticket.params["engine"]]
        pin = source.pins.pop(ticket.params["number"], None)
        right = (
            pin is not None and not source.broken and time.monotonic() < pin.expires and (pin.tokens, pin.version) == (tokens, self.version)
        )
        self.pulled += len(tokens)
        self._cache(tokens, right)
        return right

    def _prefill(self, tokens: list[int]) -> bool:
        """Whether the KV of these is right, with what the cache has of them."""
        known = max((p for p in self.cache if tuple(tokens[: len(p)]) == p), key=len, default=())
        self.cached += len(known)
        self.computed += len(tokens) - len(known)
        right = self.cache.get(known, True)
        self._cache(tokens, right)
        return right

    def _cache(self, tokens: list[int], right: bool) -> None:
        whole = len(tokens) // BLOCK * BLOCK
        if whole:
            self.cache.setdefault(tuple(tokens[:whole]), right)
