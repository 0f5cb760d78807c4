"""KV between two real vLLM servers: what is told to them (fast), and the whole of it on CPU in fp32 (marked)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from gyre_hpc.engines import handover_nixl
from gyre_hpc.engines.factory import connect, start_engine
from gyre_hpc.engines.handover import Counters, Departure, Doubt, Ticket
from gyre_hpc.engines.handover_nixl import NixlLink, options, read_counters
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineServer, EngineSpec, GenerateRequest, Sampling
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.router import Router
from tests.engines.models import VOCABULARY, plain_logprobs, save_random

WINDOW = 2048
BLOCK = handover_nixl.SMALLEST_BLOCK
LEASE = 60
PATIENCE = 15.0
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
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    )
    model, other = save_random(root / "model", 0, config), save_random(root / "other", 1, config)
    given: dict[str, object] = {"kv_gib": 1, "num_gpu_blocks_override": 400}
    specs = [EngineSpec("vllm", model, 0, 8, WINDOW, root / f"{name}.log", options=given, handover="nixl") for name in "ab"]
    patch = pytest.MonkeyPatch()
    patch.setattr(handover_nixl, "LEASE", LEASE)
    # the kernel ties a server's life to the thread that started it
    pools = [ThreadPoolExecutor(1) for _ in specs]
    started = [pool.submit(start_engine, spec, 280.0) for pool, spec in zip(pools, specs, strict=True)]
    try:
        yield Pair(started[0].result(), started[1].result(), model, other)
    finally:
        patch.undo()
        for future, pool in zip(started, pools, strict=True):
            if future.exception() is None:
                future.result().stop()
            pool.shutdown()


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
        tokens += chunk.tokens
        logprobs += chunk.logprobs
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


@dataclass
class Outcome:
    tokens: list[list[int]]
    """By turn, execution after execution."""
    logprobs: list[list[float]]
    counted: Counters
    reports: list[dict[str, Any]]
    new: int
    """Tokens of all turns that no engine had seen before."""
    hand_overs: int


TURNS, SAMPLED, ADDED = 3, 48, 10


async def _execution(router: Router, number: int, outcome: Outcome, gate: asyncio.Semaphore) -> None:
    """Some turns of one conversation; waits for `gate` between them."""
    prompt = random_prompt(f"e{number}", 1000 + 100 * number)
    outcome.new += len(prompt) + (TURNS - 1) * ADDED
    for i in range(TURNS):
        tokens, logprobs = await collect(router.generate(GenerateRequest(f"{number}.{i}", prompt, Sampling(SAMPLED, 0.0)), number))
        outcome.tokens.append(tokens)
        outcome.logprobs.append(logprobs)
        prompt = [*prompt, *tokens, *random_prompt(f"added {number}.{i}", ADDED)]
        await gate.acquire()


async def run_executions(pair: Pair, closes: int, nixl: bool) -> Outcome:
    """One execution after the other; `closes` in the middle of each call, and one between any two turns."""
    for engine in (pair.a, pair.b):  # nothing cached
        await asyncio.to_thread(engine.release, 60.0)
        await asyncio.to_thread(engine.restore, pair.model, 0, 60.0)
    links = [NixlLink(engine.address, PATIENCE) for engine in (pair.a, pair.b)]
    router = Router(linker=(lambda address: NixlLink(address, PATIENCE)) if nixl else lambda address: None)
    for cell, engine in enumerate((pair.a, pair.b)):
        router.set_route(cell, engine.address)
        router.open(cell)
    outcome = Outcome([], [], Counters(0, 0, 0, 0), [], 0, 0)
    before = [await link.counters() for link in links]

    async def close(number: int) -> None:
        here = router.cell_of(number) or 0
        answer = await router.close(here, 60.0)
        outcome.reports.append(answer.get("handover", {}))
        outcome.hand_overs += 1
        router.open(here)

    for number in range(3):
        gate = asyncio.Semaphore(0)
        ended = number * TURNS  # turns of those before
        task = asyncio.create_task(_execution(router, number, outcome, gate))
        for i in range(TURNS):
            for k in range(closes):
                far = (k + 1) * SAMPLED // (closes + 2)
                while not any(len(c.tokens) >= far for r in router._routes.values() for c in r.calls):
                    await asyncio.sleep(0.001)
                    if len(outcome.tokens) > ended + i:
                        break
                else:
                    await close(number)
            while len(outcome.tokens) <= ended + i:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.1)  # the router's own end of the call
            if closes and i < TURNS - 1:
                await close(number)
            gate.release()
        await task
        router.forget(number)
    after = [(await link.counters()).since(old) for link, old in zip(links, before, strict=True)]
    outcome.counted = Counters(*(sum(getattr(c, name) for c in after) for name in ("computed", "cached", "pulled", "bytes")))
    for link in links:
        await link.close()
    await router.aclose()
    return outcome


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_forced_transfers_in_calls_and_between_turns_are_invisible(pair: Pair) -> None:
    plain = await run_executions(pair, 0, nixl=False)
    moved = await run_executions(pair, 2, nixl=True)
    again = await run_executions(pair, 2, nixl=False)
    for other in (moved, again):
        assert other.tokens == plain.tokens
        differences = [abs(a - b) for x, y in zip(plain.logprobs, other.logprobs, strict=True) for a, b in zip(x, y, strict=True)]
        assert max(differences) < TOLERANCE
    done = [sum(report[name] for report in moved.reports) for name in ("calls", "conversations", "recomputed", "left")]
    # on a CPU, vLLM 0.32.0 now and then leaves a pull alone for seconds: those are computed again, and nothing else is
    assert all(set(report["doubts"]) <= {"slow"} for report in moved.reports), [report["doubts"] for report in moved.reports]
    given_up = done[2] + done[3]
    # a call that ends in the instant of a close has nothing to hand over, and what waits of it is not known yet
    assert done[0] >= 3
    assert done[1] >= 3
    # the source's one-token calls are counted too: what its cache lacks of a prompt is less than a block
    beyond = moved.counted.computed - moved.new
    print(
        f"\n{moved.hand_overs} hand-overs, {done[:2]} with KV, {done[2:]} without: {beyond} tokens computed again, ",
        end="",
    )
    print(f"{moved.counted.pulled} pulled, {sum(r['bytes'] for r in moved.reports)} bytes; recompute: {again.counted.computed - again.new}")
    print(f"slowest pin {max(r['phases']['pin'] for r in moved.reports)} s, pull {max(r['phases']['pull'] for r in moved.reports)} s")
    assert beyond <= (moved.hand_overs + 3 * TURNS) * BLOCK + given_up * WINDOW
    assert sum(r["bytes"] for r in moved.reports) > 0
    assert again.counted.pulled == 0
    all_again = again.counted.computed - again.new  # less than all at each: where a conversation comes back, the engine still has its past
    assert given_up or all_again > 3 * beyond


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
