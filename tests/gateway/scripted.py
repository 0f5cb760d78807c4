"""A scripted engine client behind a real router (the outer edge), for tests in which instants and faults must be exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from gyre_hpc.engines.protocol import EngineAddress, EngineFault, GenerateRequest, RequestRefused, Sampling, TokenChunk
from gyre_hpc.gateway.router import Router


async def collect(router: Router, call: GenerateRequest, execution: int) -> tuple[list[int], list[float], str | None]:
    tokens: list[int] = []
    logprobs: list[float] = []
    finish = None
    async for chunk in router.generate(call, execution):
        assert finish is None
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions)
        tokens.extend(chunk.tokens.tolist())
        logprobs.extend(chunk.logprobs.tolist())
        finish = chunk.finish
    return tokens, logprobs, finish


class ScriptedEngine:
    """A fake engine client: one token per `tick`, counting up from the prompt's end; `fault` says when to break."""

    def __init__(self) -> None:
        self.tick = asyncio.Event()
        self.tick.set()
        self.live: set[str] = set()
        self.most = 0
        self.served: list[str] = []
        self.fault: Callable[[int], bool] = lambda token: False
        self.broken: type[EngineFault] = EngineFault
        self.refusal: str | None = None
        self.slow_cancel = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.refusal:
            raise RequestRefused(self.refusal)
        assert request.prompt == [99, *range(request.position)]
        self.served.append(request.request_id)
        self.live.add(request.request_id)
        self.most = max(self.most, len(self.live))
        try:
            for i in range(request.sampling.max_tokens):
                await self.tick.wait()
                await asyncio.sleep(0)
                token = request.position + i
                if self.fault(token):
                    raise self.broken("scripted")
                yield TokenChunk([token], [-1.0], [0], "length" if i == request.sampling.max_tokens - 1 else None)
        finally:
            if self.slow_cancel:
                await asyncio.shield(asyncio.sleep(self.slow_cancel))
            self.live.discard(request.request_id)

    async def close(self) -> None:
        pass


def scripted(capacities: list[int], faults: int = 8) -> tuple[Router, list[ScriptedEngine]]:
    engines = [ScriptedEngine() for _ in capacities]
    router = Router(faults, 0.01, lambda address: engines[int(address.url)])
    for cell, capacity in enumerate(capacities):
        router.set_route(cell, EngineAddress("scripted", str(cell), capacity, 100))
        router.open(cell)
    return router, engines


def call(name: str, count: int = 5) -> GenerateRequest:
    return GenerateRequest(name, [99], Sampling(count))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
