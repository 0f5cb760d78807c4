"""Handing a conversation's KV cache from one engine to another when a cell leaves rollout (qwengyre.md 2.4).

Two strategies, chosen by the addresses of both engines. `recompute`: nothing moves, the destination computes the prompt again. `nixl`: the
engines' own prefill/decode disaggregation; the source *pins* the blocks of a prompt for a while, the destination *pulls* them.

Invariants:
- a hand-over is an economy, never a condition: whatever is doubtful is computed again, and the call goes on either way;
- KV is valid for one prompt and one weight version, and only while it is pinned. A pull that breaks one of the three is answered as if
  all were well, with wrong tokens (vLLM 0.32.0), so each is checked on our side: the prompt here (`Ticket.check`), the version by the guard
  in the destination's server, the time by a deadline of our own far inside the source's lease, counted from before the pin was asked
  for. A first token inside it proves that the pull was; without one the call is cancelled while the pin still holds, nothing of it is
  delivered, and the destination forgets what it cached;
- the source frees nothing before the destination has acknowledged (its first token) or the lease is over; a pin that surely nobody pulls is
  given back at once;
- phases in order, each with a deadline and an undo: pin (undo: unpin), pull (undo: cancel, forget, unpin, recompute).
Time is `time.monotonic`, seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gyre_hpc.engines.protocol import Doubt, EngineClient, EngineFault, GenerateRequest, Sampling, Ticket, TokenChunk

log = logging.getLogger(__name__)

_AT_ONCE = 8
"""Waiting conversations that are brought over at the same time; calls in flight all go at once."""
_CANCELLED = 1.0
"""Seconds after which a call that was cancelled has surely left its engine (measured: 0.06)."""
_ANSWER = 5.0
"""Seconds for what is only asked for the record, and for undoing at the end."""


class Gone(EngineFault):
    """Nothing listens there any more: whatever the engine still does, nobody will be told of it."""


@dataclass(frozen=True)
class Counters:
    """What an engine has counted since it started: tokens of prompts by where their KV came from, and bytes that it pulled."""

    computed: int
    cached: int
    pulled: int
    bytes: int

    def since(self, before: Counters) -> Counters:
        """What came on top of `before`."""
        mine, old = (self.computed, self.cached, self.pulled, self.bytes), (before.computed, before.cached, before.pulled, before.bytes)
        return Counters(*(a - b for a, b in zip(mine, old, strict=True)))


class KvLink(Protocol):
    """One engine's side of hand-overs. All but `close` raise EngineFault."""

    patience: float
    """Seconds from asking for a pin to the destination's first token."""

    async def pin(self, tokens: Sequence[int]) -> Ticket:
        """Keep the KV of these tokens, computing what the prefix cache lacks. Raises Doubt if another number of them was pinned."""
        ...

    async def unpin(self, ticket: Ticket) -> None:
        """Give a pin back that nobody pulls; no error if it is gone."""
        ...

    async def forget(self) -> None:
        """No call that begins from now on finds KV that was cached before."""
        ...

    async def counters(self) -> Counters: ...

    async def block(self) -> int:
        """Tokens of a KV block: a prefix cache knows whole ones only."""
        ...

    async def close(self) -> None: ...


class Departure:
    """What one engine hands over while its route closes; `over` once the engine may be released. Counts how it went."""

    def __init__(self, source: KvLink) -> None:
        self.over = False
        self._source = source
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._began = time.monotonic()
        self._before: dict[KvLink, Counters] = {}
        self._counting = asyncio.Lock()
        self._undoing: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._doubts: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._seconds = {"pin": 0.0, "pull": 0.0}

    @property
    def patience(self) -> float:
        """Seconds after which whatever is not there yet is given up: a pin and a pull, and some more that had to queue."""
        return 2.0 * self._source.patience

    async def stream(self, client: EngineClient, target: KvLink | None, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """A call that goes on at `client`, with its KV from the source if that is certain."""
        begun = await self._begin(client, target, request)
        self._done["recomputed" if begun is None else "calls"] += 1
        stream = client.generate(request) if begun is None else begun[0]
        try:
            if begun is not None:
                yield begun[1]
                if begun[1].finish is not None:
                    return
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    async def bring(self, client: EngineClient, target: KvLink | None, tokens: Sequence[int]) -> bool:
        """A waiting conversation's KV into the destination's prefix cache; False: its next turn computes it."""
        async with self._gate:
            found = await self._found(tokens)
            # its one token is thrown away: only the pull counts
            begun = await self._begin(client, target, GenerateRequest("hand-over", tokens[:found], Sampling(1, 0.0))) if found else None
            if begun is not None:
                await begun[0].aclose()
        self._done["left" if begun is None else "conversations"] += 1
        return begun is not None

    async def _found(self, tokens: Sequence[int]) -> int:
        """How many tokens of a waiting conversation are asked for: the whole blocks, and one, which makes an engine answer; 0: none."""
        try:
            block = await self._source.block()
        except EngineFault as fault:
            self._doubt("source", fault)
            return 0
        whole = (len(tokens) - 1) // block * block
        if not whole:
            self._doubt("short", None)
        return whole + 1 if whole else 0

    async def _begin(
        self, client: EngineClient, target: KvLink | None, request: GenerateRequest
    ) -> tuple[AsyncGenerator[TokenChunk, None], TokenChunk] | None:
        """Pin and pull: the destination's stream and its first chunk; None in any doubt."""
        ticket = await self._pin(target, request.prompt)
        if ticket is None or target is None:
            return None
        stream = client.generate(replace(request, ticket=ticket))
        try:
            return stream, await self._pull(stream, ticket)
        except EngineFault as fault:
            await stream.aclose()
            self._doubt(fault.reason if isinstance(fault, Doubt) else "destination", fault)
            await self._take_back(ticket, target, refused=isinstance(fault, Doubt) and fault.reason != "slow")
            return None
        except asyncio.CancelledError:  # given up: a pin that stays would hold up the source's pause
            self._later(self._take_back(ticket, target, refused=False))
            raise

    async def _pin(self, target: KvLink | None, tokens: Sequence[int]) -> Ticket | None:
        if target is None or self.over:
            self._doubt("over" if self.over else "unable", None)
            return None
        try:
            async with self._counting:
                if target not in self._before:
                    self._before[target] = await target.counters()
        except EngineFault as fault:
            self._doubt("destination", fault)
            return None
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._source.patience):
                ticket = await self._source.pin(tokens)
        except TimeoutError:
            self._doubt("pin", None)
            return None
        except EngineFault as fault:
            self._doubt(fault.reason if isinstance(fault, Doubt) else "source", fault)
            return None
        self._seconds["pin"] = max(self._seconds["pin"], time.monotonic() - began)
        return ticket

    async def _pull(self, stream: AsyncGenerator[TokenChunk, None], ticket: Ticket) -> TokenChunk:
        """The first chunk, if it is there in time. Raises Doubt, EngineFault."""
        began = time.monotonic()
        first = None
        with contextlib.suppress(TimeoutError):  # the clock decides, below
            async with asyncio.timeout(max(ticket.until - began, 0.0)):
                first = await anext(stream, None)
        now = time.monotonic()
        if now >= ticket.until:
            raise Doubt("slow", f"no token {now - began:.1f} s after the pull was asked for")
        if first is None:
            raise EngineFault("the destination's stream ended without a token")
        self._seconds["pull"] = max(self._seconds["pull"], now - began)
        self._done["tokens"] += len(ticket.tokens)
        return first

    async def _take_back(self, ticket: Ticket, target: KvLink, refused: bool) -> None:
        """Undo a pull that failed. `refused`: the destination never began it; else what it caches must not be found."""
        if not refused:
            try:
                await target.forget()
            except Gone:
                log.info("hand-over: the destination is gone, the pin is given back")
            except EngineFault as fault:
                log.warning("hand-over: a pin stays until its lease ends, the destination may be pulling: %s", fault)
                return
        self._later(self._unpin(ticket, 0.0 if refused else _CANCELLED))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        undoing = asyncio.get_running_loop().create_task(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _unpin(self, ticket: Ticket, after: float) -> None:
        await asyncio.sleep(after)
        try:
            await self._source.unpin(ticket)
        except EngineFault as fault:
            log.warning("hand-over: a pin stays until its lease ends: %s", fault)

    def _doubt(self, reason: str, fault: EngineFault | None) -> None:
        self._doubts[reason] += 1
        if fault is not None:
            log.warning("hand-over: computed again (%s): %s", reason, fault)

    async def end(self) -> None:
        """Begin nothing more, and finish undoing."""
        self.over = True
        until = time.monotonic() + _ANSWER
        while self._undoing and time.monotonic() < until:  # what is undone may have more to undo
            await asyncio.wait(set(self._undoing), timeout=_ANSWER)
        self._ended.set()

    async def report(self) -> dict[str, Any]:
        """How it went, once it has ended.

        {calls, conversations, recomputed, left, tokens, bytes, doubts: {reason: n}, phases: {pin, pull}, seconds}: `calls` and
        `conversations` came with their KV, `recomputed` calls and `left` conversations without; `tokens` and `bytes` of KV went over; a
        phase's seconds are those of its slowest.
        """
        await self._ended.wait()
        moved = 0
        for target, before in self._before.items():
            try:
                async with asyncio.timeout(_ANSWER):
                    moved += (await target.counters()).since(before).bytes
            except (EngineFault, TimeoutError) as fault:
                log.warning("hand-over: the bytes of one destination are not known: %s", fault)
        counts = {name: self._done[name] for name in ("calls", "conversations", "recomputed", "left", "tokens")}
        phases = {name: round(seconds, 4) for name, seconds in self._seconds.items()}
        return {
            **counts,
            "bytes": moved,
            "doubts": dict(self._doubts),
            "phases": phases,
            "seconds": round(time.monotonic() - self._began, 4),
        }
