"""An engine that dies in the middle of a hand-over, of kill -9: what it had to give or to take is computed again, and nothing is lost.

The source is frozen between pin and pull, so that the kill meets a pull that has begun and has not ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gyre_hpc.engines.handover import KvLink
from gyre_hpc.engines.handover_nixl import NixlLink
from gyre_hpc.engines.protocol import EngineAddress, EngineServer, GenerateRequest, Sampling, Ticket
from gyre_hpc.gateway.router import Router
from tests.engines.forced import Halting
from tests.engines.models import VOCABULARY, plain_logprobs
from tests.engines.vllm_servers import Servers, freeze, kill, small_model, thaw

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
HALT, SAMPLED = 16, 40
PATIENCE = 20.0


class Freezing(NixlLink):
    """Its engine stands still as soon as it has pinned something."""

    def __init__(self, engine: EngineServer) -> None:
        super().__init__(engine.address, PATIENCE)
        self._engine = engine
        self.frozen = asyncio.Event()

    async def pin(self, tokens: Sequence[int]) -> Ticket:
        ticket = await super().pin(tokens)
        await asyncio.to_thread(freeze, self._engine)
        self.frozen.set()
        return ticket


class Scene:
    """Cell 0 leaves while a call is in flight there; cell 1 is its destination."""

    def __init__(self, servers: Servers, source: EngineServer, destination: EngineServer) -> None:
        self.model, self.source, self.destination = servers.model, source, destination
        self.link = Freezing(source)
        self.router = Router(connector=lambda address: Halting(address, (HALT,)), linker=self._link)
        self.router.set_route(0, source.address)
        self.router.set_route(1, destination.address)
        rng = random.Random(source.pid)
        self.prompt = [rng.randrange(VOCABULARY) for _ in range(900)]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def _link(self, address: EngineAddress) -> KvLink:
        return self.link if address == self.source.address else NixlLink(address, PATIENCE)

    async def begin(self) -> tuple[asyncio.Task[None], asyncio.Task[dict[str, object]]]:
        """The call and the close; the pull has been asked for and can't end."""
        self.router.open(0)
        call = asyncio.create_task(self._call())
        while len(self.tokens) < HALT:
            assert not call.done(), call.result()
            await asyncio.sleep(0.005)
        self.router.open(1)
        closing = asyncio.create_task(self.router.close(0, 120.0))
        await self.link.frozen.wait()
        while not (await asyncio.to_thread(self._pulling)):
            assert not closing.done(), closing.result()
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # ten times what a pull takes
        assert len(self.tokens) == HALT, "the pull has ended without its source"
        return call, closing

    def _pulling(self) -> bool:
        return bool(self.destination.health(10.0)["in_flight"])  # type: ignore[attr-defined]

    async def _call(self) -> None:
        async for chunk in self.router.generate(GenerateRequest("k", self.prompt, Sampling(SAMPLED, 0.0)), 0):
            self.tokens.extend(chunk.tokens.tolist())
            self.logprobs.extend(chunk.logprobs.tolist())

    def right(self) -> None:
        """Every token came once, and is the greedy one of a plain forward pass."""
        assert len(self.tokens) == SAMPLED
        expected = plain_logprobs(self.model, self.prompt, self.tokens)
        assert max(abs(x - y) for x, y in zip(expected, self.logprobs, strict=True)) < TOLERANCE


async def freed(engine: EngineServer, model: Path) -> None:
    """No pin and no pull that failed keeps a block: an engine that has one can't drop its prefix cache."""
    await asyncio.to_thread(engine.release, 30.0)
    await asyncio.to_thread(engine.restore, model, 0, 60.0)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    started = Servers(small_model(tmp_path / "model", 0))
    yield started
    started.stop()


async def test_the_source_and_then_the_destination_of_a_pull_are_killed(servers: Servers) -> None:
    """One test: two servers start, and one more in place of the first that dies."""
    first, other = await asyncio.to_thread(servers.start, "first", "other")
    scene = Scene(servers, first, other)
    call, closing = await scene.begin()
    await asyncio.to_thread(kill, first)
    await call
    scene.right()
    print("\nsource killed:", await closing)
    await scene.router.aclose()
    await freed(other, servers.model)

    (second,) = await asyncio.to_thread(servers.start, "second")
    scene = Scene(servers, second, other)
    call, closing = await scene.begin()
    await asyncio.to_thread(kill, other)
    await asyncio.to_thread(thaw, second)
    scene.router.set_route(1, None)  # as its cell says when it finds its engine dead
    answer = await closing
    print("destination killed:", answer)
    assert answer["handover"]["doubts"] == {"destination": 1}  # type: ignore[index]
    await freed(second, servers.model)
    assert not call.done()
    scene.router.open(0)
    await call
    scene.right()
    await scene.router.aclose()
