"""No token is lost, doubled or changed by closes and faults at any instant; capacity and order hold.

Real torch engines where tokens matter, a scripted client (the outer edge) where instants and faults must be exact.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.handover import link
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineUnreachable, GenerateRequest, RequestRefused, Sampling, TokenChunk
from gyre_hpc.gateway.leaving import added
from gyre_hpc.gateway.router import Router
from tests.engines.models import VOCABULARY, plain_logprobs, save_random, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("router") / "model", 0)


def calls(count: int, seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
        stop = (rng.randrange(VOCABULARY),) if rng.random() < 0.3 else ()
        made.append(GenerateRequest(f"c{i}", prompt, Sampling(rng.randrange(1, 40), rng.choice([0.0, 1.0, 0.8]), seed=seed + i, stop=stop)))
    return made


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


@pytest.mark.parametrize("seed", range(2))
async def test_closes_at_random_instants_change_nothing(model: Path, seed: int) -> None:
    requests = calls(24, seed)
    rng = random.Random(seed)
    async with serving(model, 3, rows=6, flush=1) as addresses:
        router = Router()
        for cell, address in enumerate(addresses):
            router.set_route(cell, address)
            router.open(cell)
        undisturbed = await asyncio.gather(*(collect(router, call, i) for i, call in enumerate(requests)))
        tasks = [asyncio.create_task(collect(router, call, i)) for i, call in enumerate(requests)]
        moved, closed = 0.0, set[int]()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(rng.random() * 0.01)
            cell = rng.randrange(3)
            if cell in closed:
                router.open(cell)
                closed.discard(cell)
            elif rng.random() < 0.5 or len(closed) < 2:  # now and then no route is left at all
                answer = await router.close(cell, 5.0)
                moved += answer["moved"] + answer["held"]
                closed.add(cell)
                counts = router.counts()["cells"][cell]  # type: ignore[index]
                assert (counts["in_flight"], counts["executions"]) == (0, 0)
            for counts in router.counts()["cells"].values():  # type: ignore[attr-defined]
                assert counts["executions"] <= 6
        disturbed = [task.result() for task in tasks]
        assert moved > 0
        counts = router.counts()
        assert (counts["in_flight"], counts["held"]) == (0, 0)
        await router.aclose()
    for call, (tokens, logprobs, finish), (again, _, finish_again) in zip(requests, undisturbed, disturbed, strict=True):
        assert (again, finish_again) == (tokens, finish)
        expected = plain_logprobs(model, list(call.prompt), tokens, call.sampling.temperature)
        assert max(abs(a - b) for a, b in zip(expected, logprobs, strict=True)) < 1e-4
        assert finish == ("stop" if tokens[-1] in call.sampling.stop else "length")
        assert len(tokens) == call.sampling.max_tokens or finish == "stop"


async def test_an_engine_that_dies_is_survived_and_a_leaving_reader_frees_its_row(model: Path) -> None:
    async with serving(model, 2, flush=1) as (one, two):
        router = Router()
        for cell, address in enumerate((one, two)):
            router.set_route(cell, address)
            router.open(cell)
        call = GenerateRequest("x", [5] * 10, Sampling(60, seed=3))
        expected = (await collect(router, call, 0))[0]
        stream = router.generate(call, 0)
        got = list((await anext(stream)).tokens)
        home = next(c for c, n in router.counts()["cells"].items() if n["in_flight"])  # type: ignore[attr-defined]
        router.set_route(home, None)
        async for chunk in stream:
            got.extend(chunk.tokens.tolist())
        assert got == expected
        stream = router.generate(call, 0)
        await anext(stream)
        await stream.aclose()
        assert router.counts()["in_flight"] == 0
        await router.aclose()


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


async def test_capacity_counts_executions_and_the_rest_waits_in_order() -> None:
    router, (engine,) = scripted([2])
    engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(f"e{e}.{k}"), e)) for e, k in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1))]
    await settle()
    assert engine.served == ["e0.0", "e1.0", "e0.1"]
    assert (router.counts()["in_flight"], router.counts()["held"]) == (3, 2)
    assert router.counts()["cells"][0]["executions"] == 2  # type: ignore[index]
    engine.tick.set()
    assert [len((await task)[0]) for task in tasks] == [5] * 5
    assert engine.served[3:] == ["e2.0", "e3.0"]
    assert engine.most == 3


async def test_an_execution_stays_while_it_can_and_moves_to_the_last_cell() -> None:
    router, engines = scripted([4, 4, 4])
    for execution in range(6):
        await collect(router, call(f"first{execution}"), execution)
    assert [len(e.served) for e in engines] == [2, 2, 2]
    for execution in range(6):
        await collect(router, call(f"second{execution}"), execution)
    for engine in engines:
        assert [name.removeprefix("second") for name in engine.served[2:]] == [name.removeprefix("first") for name in engine.served[:2]]
    for engine in engines:
        engine.tick.clear()
        engine.served.clear()
    tasks = [asyncio.create_task(collect(router, call(f"third{execution}"), execution)) for execution in range(6)]
    await settle()
    assert await router.close(0, 1.0) | {"seconds": 0} == {"moved": 2, "held": 0, "seconds": 0}
    await settle()
    assert [len(e.live) for e in engines] == [0, 2, 4]
    assert await router.close(2, 1.0) | {"seconds": 0} == {"moved": 2, "held": 2, "seconds": 0}
    router.open(0)
    for engine in engines:
        engine.tick.set()
    assert [(await task)[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 6
    for execution in range(6):
        router.forget(execution)
    assert all(cell["homes"] == 0 for cell in router.counts()["cells"].values())  # type: ignore[attr-defined]


async def test_without_a_route_calls_are_held_until_one_opens() -> None:
    router, (engine,) = scripted([4])
    await router.close(0, 1.0)
    task = asyncio.create_task(collect(router, call("held"), 0))
    await settle()
    assert (router.counts()["held"], engine.served) == (1, [])
    gone = asyncio.create_task(collect(router, call("gone"), 1))
    await settle()
    gone.cancel()
    await settle()
    assert router.counts()["held"] == 1
    router.open(0)
    assert (await task)[0] == [0, 1, 2, 3, 4]
    assert engine.served == ["held"]
    assert await router.close(17, 1.0) == {"moved": 0, "held": 0, "seconds": 0.0}
    with pytest.raises(KeyError):
        router.open(17)


async def test_faults_are_continued_elsewhere_and_counted_in_a_row() -> None:
    router, (one, two) = scripted([4, 4], faults=2)
    two.fault = lambda token: token == 3
    assert (await collect(router, call("x", 8), 0))[0] == list(range(8))
    assert (one.served, two.served) == (["x"], ["x"])
    router, (only,) = scripted([4], faults=2)
    seen: dict[int, int] = {}

    def every_third_once(token: int) -> bool:
        seen[token] = seen.get(token, 0) + 1
        return token % 3 == 2 and seen[token] == 1

    only.fault = every_third_once  # three faults, but never two in a row
    assert (await collect(router, call("y", 9), 0))[0] == list(range(9))
    only.fault = lambda token: token == 1
    with pytest.raises(EngineFault, match="scripted"):
        await collect(router, call("z", 9), 0)
    assert only.served.count("z") == 3
    only.refusal = "too long"
    with pytest.raises(RequestRefused, match="too long"):
        await collect(router, call("r"), 0)
    assert router.counts()["in_flight"] == 0


async def test_a_call_outlives_an_engine_that_nobody_can_reach_until_another_one_comes() -> None:
    router, (only,) = scripted([4], faults=2)
    only.broken = EngineUnreachable
    only.fault = lambda token: token == 2
    task = asyncio.create_task(collect(router, call("x"), 0))
    while only.served.count("x") < 6:
        await asyncio.sleep(0.01)
    assert not task.done(), "more faults than it survives"
    only.fault = lambda token: False
    assert (await asyncio.wait_for(task, 5.0))[0] == [0, 1, 2, 3, 4]


async def test_calls_that_fail_together_are_one_fault_of_the_engine() -> None:
    """Twenty in a row would be minutes of cool-down."""
    router, (engine,) = scripted([30])
    broken = True
    engine.fault = lambda token: broken and token == 2
    tasks = [asyncio.create_task(collect(router, call(f"x{i}"), i)) for i in range(20)]
    await settle()
    broken = False
    assert [(await asyncio.wait_for(task, 2.0))[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 20


async def test_close_says_so_when_an_engine_does_not_let_go() -> None:
    router, (engine,) = scripted([4])
    engine.tick.clear()
    task = asyncio.create_task(collect(router, call("x"), 0))
    await settle()
    engine.slow_cancel = 0.3
    with pytest.raises(TimeoutError, match="cell 0: 1 calls still there"):
        await router.close(0, 0.05)
    engine.slow_cancel = 0.0
    engine.tick.set()
    await asyncio.sleep(0.4)
    assert (router.counts()["in_flight"], router.counts()["held"]) == (0, 1)
    router.open(0)
    assert (await task)[0] == [0, 1, 2, 3, 4]


async def test_a_stop_token_that_the_engine_could_not_report_still_ends_the_call() -> None:
    """The route closes between the last token and the engine's word that it was the last."""
    router, (engine,) = scripted([4])
    request = GenerateRequest("s", [99], Sampling(9, stop=(3,)))
    assert await collect(router, request, 0) == ([0, 1, 2, 3], [-1.0] * 4, "stop")
    assert engine.live == set()


async def test_the_end_fails_what_is_left() -> None:
    router, (engine,) = scripted([1])
    engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(f"x{i}"), i)) for i in range(2)]
    await settle()
    await router.aclose()
    for task in tasks:
        with pytest.raises(EngineFault, match="gateway stops"):
            await task


def test_the_default_connector_is_the_factory() -> None:
    assert Router.__init__.__defaults__ == (8, 0.2, connect, link)


async def test_a_cell_of_two_engines_opens_and_closes_as_one() -> None:
    router, engines = scripted([])
    engines += [ScriptedEngine() for _ in range(3)]
    for number, (cell, index) in enumerate([(0, 0), (1, 0), (1, 1)]):
        router.set_route(cell, EngineAddress("scripted", str(number), 2, 100), index)
    router.open(1)
    for engine in engines:
        engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(str(i)), i)) for i in range(4)]
    await asyncio.sleep(0.02)
    assert [len(engine.live) for engine in engines] == [0, 2, 2], "the emptier of a cell's engines takes what comes"
    assert router.counts()["cells"][1] == {  # type: ignore[index]
        "open": True,
        "engines": 2,
        "in_flight": 4,
        "executions": 4,
        "homes": 4,
        "capacity": 4,
        "tokens": 0,
    }
    router.open(0)
    answer = await router.close(1, 1.0)
    assert (answer["moved"], answer["held"]) == (2, 2), "the other cell holds two; none went to the closing cell's other engine"
    assert [len(engine.live) for engine in engines] == [2, 0, 0]
    assert {len(engine.served) for engine in engines[1:]} == {2}
    router.open(1)
    for engine in engines:
        engine.tick.set()
    assert [tokens for tokens, _, _ in await asyncio.gather(*tasks)] == [list(range(5))] * 4
    router.set_route(1, None, 1)
    assert router.counts()["cells"][1]["engines"] == 1  # type: ignore[index]
    await router.aclose()


async def test_what_the_engines_of_a_cell_handed_over_adds_up() -> None:
    one = {"calls": 1, "doubts": {"late": 1}, "phases": {"pin": 0.2}, "seconds": 0.4}
    two = {"calls": 2, "doubts": {}, "phases": {"pin": 0.1}, "seconds": 0.6}
    assert added([one, two]) == {"calls": 3, "doubts": {"late": 1}, "phases": {"pin": 0.2}, "seconds": 0.6}
    assert added([]) == {}
