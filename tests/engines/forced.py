"""Executions that are handed over at places chosen beforehand, between two engines whose own counters say what each hand-over cost.

A call is not read beyond a place until the close that is forced there cancels it, so each hand-over happens, and where it should. Who has
left is released and restored before it may be left for again, as in a run: its KV is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.handover import Counters
from gyre_hpc.engines.handover_nixl import NixlLink
from gyre_hpc.engines.protocol import EngineAddress, EngineClient, EngineServer, GenerateRequest, Sampling, TokenChunk
from gyre_hpc.gateway.router import Router

CANARY = 5
"""Tokens of the prompt with which an engine is tried after `restore`."""


class Halting:
    """A client that reads a call to each of these places, and nothing beyond until the call is cancelled there."""

    def __init__(self, address: EngineAddress, places: Sequence[int]) -> None:
        self._client: EngineClient = connect(address)
        self._places = places

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        place = next((place for place in self._places if place > request.position), None)
        left = None if place is None else place - request.position
        async with aclosing(self._client.generate(request)) as stream:
            async for chunk in stream:
                if left is None or (chunk.finish is not None and len(chunk.tokens) < left):
                    yield chunk
                    continue
                yield TokenChunk(chunk.tokens[:left], chunk.logprobs[:left], chunk.versions[:left])
                left -= len(chunk.tokens)
                if left <= 0:
                    await asyncio.Event().wait()

    async def close(self) -> None:
        await self._client.close()


@dataclass(frozen=True)
class HandOver:
    """One that was forced."""

    kind: str
    """`call`: in mid-generation; `turn`: of a conversation that waits for a tool."""
    source: int
    tokens: int
    """Of the prompt with which the conversation goes on at the destination."""
    new: int
    """Of these, how many the source had no KV of: the last one sampled, and what a tool added."""
    counted: Counters
    """What both engines together computed, found and pulled for it, to the first token that came of it."""
    report: dict[str, Any]


@dataclass
class Outcome:
    """Of one execution, in order."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hand_overs: list[HandOver] = field(default_factory=list)


class Forced:
    """Two engines behind a router, of which one is closed at a time. `run`, and in the end `aclose`."""

    def __init__(self, engines: Sequence[EngineServer], model: Path, places: Sequence[int], nixl: bool, patience: float) -> None:
        """`places`: after how many of a call's tokens hand-overs are forced; without any, none between turns either."""
        self._engines, self._model, self._places = engines, model, places
        self._links = [NixlLink(engine.address, patience) for engine in engines]
        self._router = Router(
            connector=lambda address: Halting(address, places),
            linker=(lambda address: NixlLink(address, patience)) if nixl else lambda address: None,
        )
        self._expected = 0
        """Tokens of prompts that the engines must have counted."""
        self._tokens: list[int] = []
        """Of the turn in hand."""

    async def run(self, execution: int, prompt: list[int], added: Sequence[list[int]], sampled: int) -> Outcome:
        """A turn of `sampled` tokens for the prompt, and one more after each of `added`."""
        self._expected = sum([_all(await link.counters()) for link in self._links])
        for cell, engine in enumerate(self._engines):
            self._router.set_route(cell, engine.address)
            await self._freed(cell)
            self._router.open(cell)
        outcome = Outcome()
        for number, more in enumerate([*added, []]):
            before, self._tokens = await self._settled(), []
            self._expected += len(prompt)
            call = asyncio.create_task(self._call(execution, number, prompt, sampled))
            await self._sampled(1, call)
            if number and self._places:  # the first token after a hand-over between turns
                counted = (await self._settled()).since(before)
                left = outcome.hand_overs.pop()
                outcome.hand_overs.append(replace(left, tokens=len(prompt), counted=_sum([left.counted, counted])))
            for place in self._places:
                await self._sampled(place, call)
                outcome.hand_overs.append(await self._leave(execution, call, [*prompt, *self._tokens], 1))
            outcome.logprobs += await call
            outcome.tokens += self._tokens
            prompt = [*prompt, *self._tokens, *more]
            if self._places and more:
                outcome.hand_overs.append(await self._leave(execution, None, prompt, 1 + len(more)))
        self._router.forget(execution)
        return outcome

    async def aclose(self) -> None:
        for link in self._links:
            await link.close()
        await self._router.aclose()

    async def _call(self, execution: int, number: int, prompt: list[int], sampled: int) -> list[float]:
        logprobs: list[float] = []
        async for chunk in self._router.generate(GenerateRequest(f"{execution}.{number}", prompt, Sampling(sampled, 0.0)), execution):
            self._tokens.extend(chunk.tokens.tolist())
            logprobs.extend(chunk.logprobs.tolist())
        assert len(self._tokens) == sampled
        return logprobs

    async def _sampled(self, place: int, call: asyncio.Task[list[float]]) -> None:
        while len(self._tokens) < place:
            assert not call.done(), call.result()
            await asyncio.sleep(0.002)

    async def _leave(self, execution: int, call: asyncio.Task[list[float]] | None, tokens: list[int], new: int) -> HandOver:
        source = self._router.cell_of(execution)
        assert source is not None
        before = await self._settled()
        answer = await self._router.close(source, 200.0)
        assert answer["moved"] == (call is not None)
        report = answer.get("handover", {})
        self._expected += 2 * report.get("tokens", 0)  # a pin and a pull
        if call is not None and not report.get("calls"):
            self._expected += len(tokens)
            await self._sampled(len(self._tokens) + 1, call)
        counted = (await self._settled()).since(before)
        await self._freed(source)
        self._router.open(source)
        return HandOver("turn" if call is None else "call", source, len(tokens), new, counted, report)

    async def _freed(self, cell: int) -> None:
        """What an engine goes through that leaves rollout and comes back."""
        await asyncio.to_thread(self._engines[cell].release, 100.0)
        await asyncio.to_thread(self._engines[cell].restore, self._model, 0, 100.0)
        self._expected += CANARY

    async def _settled(self) -> Counters:
        """What both engines have counted, once all that is expected is there: they count a moment after they answer."""
        for _ in range(1200):
            whole = _sum([await link.counters() for link in self._links])
            if _all(whole) == self._expected:
                return whole
            await asyncio.sleep(0.025)
        raise AssertionError(f"the engines counted {whole}, expected are {self._expected} tokens")


def _all(counted: Counters) -> int:
    return counted.computed + counted.cached + counted.pulled


def _sum(counters: Sequence[Counters]) -> Counters:
    parts = [(c.computed, c.cached, c.pulled, c.bytes) for c in counters]
    return Counters(*map(sum, zip(*parts, strict=True)))
