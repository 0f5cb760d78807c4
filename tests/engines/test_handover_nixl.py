"""KV between two real vLLM servers: what is told to them (fast), and the whole of it on CPU in fp32 (marked)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gyre_hpc.engines import handover_nixl
from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.handover import Counters, Departure, Gone
from gyre_hpc.engines.handover_nixl import Ended, NixlLink, options, read_block, read_counters
from gyre_hpc.engines.protocol import Doubt, EngineAddress, EngineFault, EngineServer, GenerateRequest, Sampling, Ticket
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.router import Router
from tests.engines.forced import Forced, Outcome
from tests.engines.models import VOCABULARY, plain_logprobs
from tests.engines.vllm_servers import Servers, small_model

BLOCK = handover_nixl.SMALLEST_BLOCK
LEASE = 180
PATIENCE = 60.0
"""Both far beyond what crowded cores need: nothing here is to be computed again for its slowness."""
PLACES, SAMPLED = (16, 32), 48
TOLERANCE = 1e-4


def test_the_server_is_told_to_be_both_sides_and_what_contradicts_is_refused() -> None:
    told = options({}, cpu=True)
    assert told["block-size"] == BLOCK
    transfer: Any = told["kv-transfer-config"]
    assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": handover_nixl.LEASE, "num_threads": 0}
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_consumer", "recompute")
    assert options({"block-size": 64}, cpu=True)["block-size"] == 64
    assert "block-size" not in options({}, cpu=False)
    with pytest.raises(ConfigError, match=r"block_size = 16 .*; 32 or more on a CPU"):
        options({"block-size": 16}, cpu=True)
    with pytest.raises(ConfigError, match="take one of the two out"):
        options({"kv-transfer-config": {}}, cpu=True)


def test_no_heartbeat_moves_the_end_of_a_lease_that_is_over() -> None:
    """As vLLM's worker counts: `_handle_heartbeat` and `_reap_expired_send_leases`."""
    lease: float = Ended(0.0)
    lease = max(lease, time.perf_counter() + 60.0)
    assert time.perf_counter() >= lease


def test_counters_are_read_over_all_cores_of_an_engine() -> None:
    text = """# HELP vllm:prompt_tokens_by_source_total x
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 2.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 32.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1.6e+03
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.703936e+06
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 1.0
"""
    assert read_counters(text) == Counters(7, 32, 1600, 1703936)


def test_a_block_is_what_the_server_says() -> None:
    assert read_block('# HELP x\nvllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="400"} 1.0\n') == 64
    assert read_block('vllm:cache_config_info{_block_size="9",x="1",block_size="32"} 1.0\n') == 32
    with pytest.raises(EngineFault, match="do not tell its block size"):
        read_block("vllm:nothing 1.0\n")


async def test_who_drops_connections_is_asked_again_until_it_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()
        if asked == 5:
            server.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = NixlLink(EngineAddress("vllm", f"http://127.0.0.1:{port}/secret", 8, 512, "nixl"), 5.0)
    monkeypatch.setattr(handover_nixl, "_DYING", 0.0)
    with pytest.raises(EngineFault, match="did not answer gyre/forget") as caught:
        await link.forget()
    assert not isinstance(caught.value, Gone), "it may be alive"
    monkeypatch.setattr(handover_nixl, "_DYING", 60.0)
    for ask in (link.forget, link.counters, link.block):
        with pytest.raises(Gone, match="did not answer"):
            await ask()
    assert asked == 5
    await link.close()


# ---- two real servers


@dataclass(frozen=True)
class Pair:
    """Two servers, of one model; `other` has the same shape and different weights."""

    a: EngineServer
    b: EngineServer
    model: Path
    other: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    servers = Servers(small_model(root / "model", 0))
    patch = pytest.MonkeyPatch()
    patch.setattr(handover_nixl, "LEASE", LEASE)
    try:
        a, b = servers.start("a", "b")
        yield Pair(a, b, servers.model, small_model(root / "other", 1))
    finally:
        patch.undo()
        servers.stop()


@dataclass(frozen=True)
class Side:
    client: Any
    link: NixlLink


@pytest.fixture
async def sides(pair: Pair) -> AsyncIterator[tuple[Side, Side]]:
    both = [Side(connect(engine.address), NixlLink(engine.address, PATIENCE)) for engine in (pair.a, pair.b)]
    yield both[0], both[1]
    for side in both:
        await side.client.close()
        await side.link.close()


async def collect(stream: Any) -> tuple[list[int], list[float]]:
    tokens, logprobs = [], []
    async for chunk in stream:
        tokens.extend(chunk.tokens.tolist())
        logprobs.extend(chunk.logprobs.tolist())
    return tokens, logprobs


def random_prompt(name: str, n: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def greedy(prompt: list[int], n: int, ticket: Ticket | None = None) -> GenerateRequest:
    return GenerateRequest("t", prompt, Sampling(n, 0.0), 0, ticket)


def right(model: Path, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """Greedy tokens and their log-probs are those of a plain forward pass."""
    expected = plain_logprobs(model, prompt, tokens)
    assert max(abs(a - b) for a, b in zip(expected, logprobs, strict=True)) < TOLERANCE


async def forced(pair: Pair, places: tuple[int, ...], nixl: bool, executions: int) -> list[Outcome]:
    """Some executions of four turns each, one after the other."""
    two = Forced((pair.a, pair.b), pair.model, places, nixl, PATIENCE)
    outcomes = []
    for i in range(executions):
        added = [random_prompt(f"added {i}.{j}", n) for j, n in enumerate((10, 37, 3))]
        outcomes.append(await two.run(i, random_prompt(f"e{i}", 700 + 301 * i), added, SAMPLED))
    await two.aclose()
    return outcomes


def same(outcomes: list[Outcome], others: list[Outcome]) -> None:
    for outcome, other in zip(outcomes, others, strict=True):
        assert outcome.tokens == other.tokens
        assert max(abs(x - y) for x, y in zip(outcome.logprobs, other.logprobs, strict=True)) < TOLERANCE


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_forced_transfers_are_invisible_and_cost_a_block_with_nixl_and_all_without(pair: Pair) -> None:
    """Two in the middle of every call and one between any two turns, in both directions; by the engines' own counters."""
    plain = await forced(pair, (), False, 2)
    moved = await forced(pair, PLACES, True, 2)
    again = await forced(pair, PLACES, False, 1)
    same(moved, plain)
    same(again, plain[:1])
    every = [hand_over for outcome in moved for hand_over in outcome.hand_overs]
    assert len(every) == 2 * (4 * len(PLACES) + 3)
    assert {(h.kind, h.source) for h in every} == {(kind, cell) for kind in ("call", "turn") for cell in (0, 1)}
    for h in every:
        assert h.report["doubts"] == {}
        assert (h.report["calls"], h.report["conversations"]) == ((1, 0) if h.kind == "call" else (0, 1))
        assert h.counted.computed <= BLOCK + h.new, h
        assert h.counted.pulled == h.report["tokens"] > h.tokens - h.new - BLOCK
        assert h.report["bytes"] == h.counted.bytes > 0
    for h in again[0].hand_overs:
        assert (h.counted.computed, h.counted.cached, h.counted.pulled) == (h.tokens, 0, 0), h
    for kind in ("call", "turn"):
        those = [h for h in every if h.kind == kind]
        beyond = [h.counted.computed - h.new for h in those]
        pins, pulls = ([h.report["phases"][phase] for h in those] for phase in ("pin", "pull"))
        print(f"\n{len(those)} of a {kind}: computed again mean {sum(beyond) / len(beyond):.1f}, at most {max(beyond)} tokens; ", end="")
        print(f"{sum(h.counted.pulled for h in those)} pulled, {sum(h.report['bytes'] for h in those)} bytes; ", end="")
        print(f"pin median {median(pins)} at most {max(pins)} s, pull median {median(pulls)} at most {max(pulls)} s")


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_two_engines_of_a_cell_leave_with_its_calls_held_and_return_as_one(pair: Pair, sides: tuple[Side, Side]) -> None:
    """No other cell has room: what both engines had is given up with their KV, and computed again when they are back."""
    router = Router(linker=lambda address: NixlLink(address, PATIENCE))
    engines = (pair.a, pair.b)
    for number, engine in enumerate(engines):
        router.set_route(1, replace(engine.address, capacity=3), number)
    router.open(1)
    before = [await side.link.counters() for side in sides]
    prompts = [random_prompt(f"two {i}", 150 + 40 * i) for i in range(6)]
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]

    async def call(i: int) -> None:
        async with aclosing(router.generate(GenerateRequest(f"two-{i}", prompts[i], Sampling(600, 0.0)), i)) as stream:
            async for chunk in stream:
                tokens[i].extend(chunk.tokens.tolist())
                logprobs[i].extend(chunk.logprobs.tolist())

    calls = [asyncio.create_task(call(i)) for i in range(len(prompts))]
    while not all(tokens):
        await asyncio.sleep(0.01)
    assert not any(task.done() for task in calls)
    left = await router.close(1, PATIENCE)
    assert (left["moved"], left["held"]) == (0, len(calls))
    assert (left["handover"]["calls"], left["handover"]["tokens"]) == (0, 0)
    for engine in engines:
        await asyncio.to_thread(engine.release, 30.0)
    held = [len(found) for found in tokens]
    for engine in engines:
        await asyncio.to_thread(engine.restore, pair.model, 0, 60.0)
    assert [len(found) for found in tokens] == held, "nothing comes while they are away"
    router.open(1)
    await asyncio.wait_for(asyncio.gather(*calls), 200)
    for i, prompt in enumerate(prompts):
        assert len(tokens[i]) == 600
        right(pair.model, prompt, tokens[i], logprobs[i])
    for side, then in zip(sides, before, strict=True):
        computed = (await side.link.counters()).since(then).computed
        assert computed >= 2 * min(map(len, prompts)), "each engine had some of them, before and after"
    await router.aclose()


@pytest.mark.vllm
async def test_a_pin_is_given_back_at_once(pair: Pair, sides: tuple[Side, Side]) -> None:
    """Else it would hold up a pause for the rest of the lease."""
    ticket = await sides[0].link.pin(random_prompt("back", 200))
    await sides[0].link.unpin(ticket)
    await sides[0].link.unpin(replace(ticket, params={**ticket.params, "remote_request_id": "unheard-of"}))
    began = time.monotonic()
    await asyncio.to_thread(pair.a.pause, 10.0)
    assert time.monotonic() - began < LEASE / 3
    await asyncio.to_thread(pair.a.resume, 5.0)


@pytest.mark.vllm
async def test_what_was_cached_is_forgotten(sides: tuple[Side, Side]) -> None:
    client, link = sides[1].client, sides[1].link
    prompt = random_prompt("forget", 200)
    counted = []
    for i in range(3):
        if i == 2:
            await link.forget()
        before = await link.counters()
        await collect(client.generate(greedy(prompt, 2)))
        counted.append((await link.counters()).since(before).computed)
    assert counted[0] == counted[2] == 200
    assert counted[1] <= BLOCK


@pytest.mark.vllm
async def test_a_late_pull_is_not_believed(pair: Pair, sides: tuple[Side, Side]) -> None:
    """The lease is over and the blocks hold other KV: without our check this is answered with wrong tokens."""
    a, b = sides
    prompt = random_prompt("late", 700)
    ticket = await a.link.pin(prompt)
    await a.link.unpin(ticket)  # as after the lease
    for i in range(20):
        await collect(a.client.generate(greedy(random_prompt(f"filler {i}", 1000), 2)))
    with pytest.raises(Doubt, match="past our deadline"):
        await collect(b.client.generate(greedy(prompt, 20, replace(ticket, until=time.monotonic()))))
    # what the check keeps off, in a cache that is forgotten afterwards
    unchecked = Ticket(ticket.tokens, ticket.version, float("inf"), ticket.params)
    tokens, logprobs = await collect(b.client.generate(greedy(prompt, 20, unchecked)))
    expected = plain_logprobs(pair.model, prompt, tokens)
    print(f"\nunchecked: log-probs off by {max(abs(x - y) for x, y in zip(expected, logprobs, strict=True)):.3g}")
    await b.link.forget()
    tokens, logprobs = await collect(Departure(a.link).stream(b.client, b.link, greedy(prompt, 20)))
    right(pair.model, prompt, tokens, logprobs)


@pytest.mark.vllm
async def test_a_pull_for_another_prompt_is_not_sent(pair: Pair, sides: tuple[Side, Side]) -> None:
    a, b = sides
    prompt = random_prompt("mine", 300)
    ticket = await a.link.pin(prompt)
    foreign = random_prompt("yours", 300)
    for changed in (foreign, [*prompt, 1], prompt[:-1]):
        with pytest.raises(Doubt, match="not the pinned one"):
            await collect(b.client.generate(greedy(changed, 5, ticket)))
    unchecked = Ticket(foreign, ticket.version, ticket.until, ticket.params)
    tokens, logprobs = await collect(b.client.generate(greedy(foreign, 20, unchecked)))
    expected = plain_logprobs(pair.model, foreign, tokens)
    print(f"\nunchecked: log-probs off by {max(abs(x - y) for x, y in zip(expected, logprobs, strict=True)):.3g}")
    await b.link.forget()
    right(pair.model, foreign, *(await collect(b.client.generate(greedy(foreign, 20)))))


@pytest.mark.vllm
async def test_kv_of_other_weights_is_refused_by_the_guard(pair: Pair, sides: tuple[Side, Side]) -> None:
    a, b = sides
    prompt = random_prompt("weights", 300)
    await asyncio.to_thread(pair.b.update_weights, pair.other, 1, 60.0)
    departure = Departure(a.link)
    tokens, logprobs = await collect(departure.stream(b.client, b.link, greedy(prompt, 20)))
    right(pair.other, prompt, tokens, logprobs)
    await departure.end()
    assert (await departure.report())["doubts"] == {"version": 1}
    began = time.monotonic()
    await asyncio.to_thread(pair.a.pause, 30.0)  # the pin was given back
    assert time.monotonic() - began < LEASE / 3
    await asyncio.to_thread(pair.a.resume, 5.0)
    await asyncio.to_thread(pair.b.update_weights, pair.model, 0, 60.0)


@pytest.mark.vllm
async def test_a_source_that_dies_after_the_pin_costs_a_computation(pair: Pair, sides: tuple[Side, Side]) -> None:
    """The last test of these servers."""
    a, b = sides
    prompt = random_prompt("death", 300)
    ticket = await a.link.pin(prompt)
    await asyncio.to_thread(pair.a.stop)
    right(pair.model, prompt, *(await collect(b.client.generate(greedy(prompt, 20, ticket)))))
    departure = Departure(a.link)
    right(pair.model, prompt, *(await collect(departure.stream(b.client, b.link, greedy(prompt, 20)))))
    await departure.end()
    assert (await departure.report())["doubts"] == {"source": 1}
    with pytest.raises(EngineFault, match="did not answer"):
        await a.link.pin(prompt)
    assert isinstance(pair.a.address, EngineAddress)
