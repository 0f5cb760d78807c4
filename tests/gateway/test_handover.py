"""Closing routes hand KV over, and no harness sees it: tokens are right whatever fails, at any instant.

Engines that answer wrongly where vLLM does (tests/engines/fake_kv.py) behind the real router.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gyre_hpc.engines.protocol import EngineAddress, EngineClient, GenerateRequest, Sampling
from gyre_hpc.gateway.router import Router
from tests.engines.fake_kv import BLOCK, FakeEngine, undisturbed


def routed(count: int, capacity: int = 8, **changes: Any) -> tuple[Router, list[FakeEngine]]:
    """A router before this many open cells, hand-over on."""
    peers: dict[str, FakeEngine] = {}
    engines = [FakeEngine(str(i), peers, **changes) for i in range(count)]

    def connect(address: EngineAddress) -> EngineClient:
        return peers[address.url]

    router = Router(connector=connect, linker=lambda address: peers[address.url])
    for cell in range(count):
        router.set_route(cell, EngineAddress("vllm", str(cell), capacity, 4096, "nixl"))
        router.open(cell)
    return router, engines


async def begun(engines: list[FakeEngine]) -> None:
    """A call is in one of them, and has some tokens more than when it was asked."""
    before = sum(engine.sampled for engine in engines)
    async with asyncio.timeout(30):
        while not any(engine.live for engine in engines) or sum(engine.sampled for engine in engines) < before + 3:
            await asyncio.sleep(0.001)


async def turn(router: Router, execution: int, prompt: list[int], n: int) -> list[int]:
    request = GenerateRequest(f"{execution}.{len(prompt)}", prompt, Sampling(n, 0.0))
    return [token async for chunk in router.generate(request, execution) for token in chunk.tokens.tolist()]


def home_of(router: Router, execution: int) -> int:
    cell = router.cell_of(execution)
    assert cell is not None
    return cell


async def test_a_close_in_mid_call_and_one_between_turns_recompute_at_most_a_block() -> None:
    router, engines = routed(2)
    prompt = list(range(41))
    task = asyncio.create_task(turn(router, 5, prompt, 40))
    await begun(engines)
    here = home_of(router, 5)
    answer = await router.close(here, 5.0)
    assert answer["moved"] == 1
    assert (answer["handover"]["calls"], answer["handover"]["recomputed"], answer["handover"]["doubts"]) == (1, 0, {})
    there = home_of(router, 5)
    assert there != here
    assert engines[there].computed == 0
    tokens = await task
    assert tokens == undisturbed(prompt, 40)
    router.open(here)
    answer = await router.close(there, 5.0)
    assert (answer["moved"], answer["handover"]["conversations"], answer["handover"]["left"]) == (0, 1, 0)
    assert home_of(router, 5) == here
    computed = engines[here].computed
    prompt += [*tokens, 7, 7, 7]
    assert await turn(router, 5, prompt, 5) == undisturbed(prompt, 5)
    assert engines[here].computed - computed <= BLOCK + 3
    assert not any(engine.pins for engine in engines)
    await router.aclose()


async def test_a_close_that_is_repeated_meanwhile_waits_for_the_first() -> None:
    router, engines = routed(2)
    await turn(router, 1, [1] * 20, 3)
    here = home_of(router, 1)
    engines[1 - here].pull_delay = 0.1
    first = asyncio.create_task(router.close(here, 5.0))
    async with asyncio.timeout(30):
        while not engines[1 - here].live:
            await asyncio.sleep(0.001)
    again = await router.close(here, 5.0)
    assert again["handover"]["conversations"] == 1
    assert (await first)["handover"]["conversations"] == 1
    await router.aclose()


async def test_for_a_publication_nothing_moves() -> None:
    router, engines = routed(2)
    await turn(router, 1, [1] * 20, 3)
    task = asyncio.create_task(turn(router, 1, [2] * 20, 30))
    await begun(engines)
    answer = await router.close(home_of(router, 1), 5.0, hand_over=False)
    assert "handover" not in answer
    assert await task == undisturbed([2] * 20, 30)
    assert sum(engine.pulled for engine in engines) == 0
    answer = await router.close(home_of(router, 1), 5.0)
    assert answer["handover"]["conversations"] == 0, "what waited lost its KV with the weights, and no room is left anyway"
    await router.aclose()


async def test_where_no_room_is_calls_are_held_and_conversations_left() -> None:
    router, engines = routed(1)
    await turn(router, 1, [1] * 20, 3)
    task = asyncio.create_task(turn(router, 2, [2] * 20, 30))
    await begun(engines)
    answer = await router.close(0, 5.0)
    assert (answer["moved"], answer["held"]) == (0, 1)
    assert answer["handover"]["conversations"] == 0
    router.open(0)
    assert await task == undisturbed([2] * 20, 30)
    assert engines[0].pulled == 0
    await router.aclose()


async def test_a_hand_over_that_stands_still_is_given_up_within_the_deadline() -> None:
    router, engines = routed(2, patience=30.0)
    await turn(router, 1, [1] * 20, 3)
    for engine in engines:
        engine.pull_delay = 60.0
    await router.close(home_of(router, 1), 0.2)
    assert await turn(router, 1, [1] * 21, 3) == undisturbed([1] * 21, 3)
    await router.aclose()


async def test_a_destination_that_dies_in_a_pull_holds_nobody_up_and_the_call_waits() -> None:
    router, engines = routed(2, patience=60.0)
    task = asyncio.create_task(turn(router, 1, [1] * 20, 30))
    await begun(engines)
    here = home_of(router, 1)
    source, destination = engines[here], engines[1 - here]
    destination.pull_delay = 0.1
    closing = asyncio.create_task(router.close(here, 120.0))
    while not destination.live:
        await asyncio.sleep(0.001)
    destination.broken = destination.gone = True
    answer = await asyncio.wait_for(closing, 30.0)
    assert answer["handover"]["doubts"] == {"destination": 1}
    assert not source.pins
    assert not task.done()
    router.set_route(1 - here, None)
    router.open(here)
    assert await task == undisturbed([1] * 20, 30)
    await router.aclose()


async def test_a_route_that_is_taken_away_while_it_hands_over_fails_no_call() -> None:
    router, engines = routed(2)
    task = asyncio.create_task(turn(router, 1, [1] * 20, 30))
    await begun(engines)
    here = home_of(router, 1)
    engines[1 - here].pull_delay = 0.1
    closing = asyncio.create_task(router.close(here, 5.0))
    async with asyncio.timeout(30):
        while not engines[1 - here].live:
            await asyncio.sleep(0.001)
    router.set_route(here, None)
    assert await task == undisturbed([1] * 20, 30)
    assert (await closing)["moved"] == 1
    await router.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_random_closes_and_failures_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    router, engines = routed(3, patience=0.1, lease=0.3)
    handed = 0

    async def execution(number: int) -> None:
        prompt = [number] * rng.randrange(5, 40)
        for _ in range(8):
            tokens = await turn(router, number, prompt, n := rng.randrange(1, 25))
            assert tokens == undisturbed(prompt, n)
            prompt = [*prompt, *tokens, *[number] * rng.randrange(1, 5)]
            await asyncio.sleep(rng.random() * 0.05)
        router.forget(number)

    tasks = [asyncio.create_task(execution(i)) for i in range(12)]
    closed: set[int] = set()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(rng.random() * 0.02)
        for engine in engines:
            engine.pull_delay = rng.choice([0.0] * 8 + [0.01, 0.2])
            engine.pin_delay = rng.choice([0.0] * 8 + [0.15])
            engine.pinned_short = rng.random() < 0.1
        cell = rng.randrange(3)
        if cell in closed:
            router.open(cell)
            closed.discard(cell)
        elif len(closed) < 2:
            closed.add(cell)
            report = (await router.close(cell, 5.0))["handover"]
            handed += report["calls"] + report["conversations"]
            counts = router.counts()["cells"][cell]  # type: ignore[index]
            assert counts["in_flight"] == 0
    await asyncio.gather(*tasks)
    assert handed > 0
    assert not router.conversations._kept, "nothing is kept of executions that ended"
    await router.aclose()
