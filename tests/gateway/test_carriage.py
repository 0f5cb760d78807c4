"""No token is lost, doubled or changed by closes and faults at any instant.

Real torch engines where tokens matter, scripted ones where instants and faults must be exact.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from gyre_hpc.engines.protocol import EngineFault, EngineUnreachable, GenerateRequest, RequestRefused, Sampling
from gyre_hpc.gateway.router import Router
from tests.engines.models import VOCABULARY, plain_logprobs, save_random, serving
from tests.gateway.scripted import call, collect, scripted, settle


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
    for asked, (tokens, logprobs, finish), (again, _, finish_again) in zip(requests, undisturbed, disturbed, strict=True):
        assert (again, finish_again) == (tokens, finish)
        expected = plain_logprobs(model, list(asked.prompt), tokens, asked.sampling.temperature)
        assert max(abs(a - b) for a, b in zip(expected, logprobs, strict=True)) < 1e-4
        assert finish == ("stop" if tokens[-1] in asked.sampling.stop else "length")
        assert len(tokens) == asked.sampling.max_tokens or finish == "stop"


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
    assert [(await asyncio.wait_for(task, 30.0))[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 20


async def test_a_stop_token_that_the_engine_could_not_report_still_ends_the_call() -> None:
    """The route closes between the last token and the engine's word that it was the last."""
    router, (engine,) = scripted([4])
    request = GenerateRequest("s", [99], Sampling(9, stop=(3,)))
    assert await collect(router, request, 0) == ([0, 1, 2, 3], [-1.0] * 4, "stop")
    assert engine.live == set()
