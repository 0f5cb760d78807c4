"""The torch engine as a process: what the leader and the gateway see of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import aiohttp
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from gyre_hpc.engines.factory import connect, start_engine
from gyre_hpc.engines.frames import MEDIA, Frames
from gyre_hpc.engines.protocol import EngineFault, EngineSpec, GenerateRequest, NotReceived, RequestRefused, Sampling, TokenChunk
from gyre_hpc.engines.torch_engine import TorchEngine, request_body, rows_of
from gyre_hpc.engines.weight_stream import Sender, Weights
from gyre_hpc.errors import ConfigError
from gyre_hpc.training.actor import published
from tests.engines.half_sender import half_sender
from tests.engines.models import VOCABULARY, plain_logprobs, save_random

TOLERANCE = 1e-4


def request(name: str, count: int, **sampling: object) -> GenerateRequest:
    rng = random.Random(name)
    return GenerateRequest(name, [rng.randrange(VOCABULARY) for _ in range(20)], Sampling(count, **sampling))  # type: ignore[arg-type]


async def collect(engine: TorchEngine, call: GenerateRequest) -> list[TokenChunk]:
    client = connect(engine.address)
    try:
        return [chunk async for chunk in client.generate(call)]
    finally:
        await client.close()


async def frame_by_frame(engine: TorchEngine, call: GenerateRequest) -> list[TokenChunk]:
    """A chunk for each frame that the engine sends: byte by byte no two come together, as they may for a client on a busy machine."""
    async with (
        aiohttp.ClientSession(headers={"Accept": MEDIA}) as session,
        session.post(f"{engine.address.url}/generate", data=request_body(call)) as answer,
    ):
        body, reader = await answer.read(), Frames()
    found = [item for byte in body for item in reader.feed(bytes([byte]))]
    assert all(isinstance(item, TokenChunk) for item in found)
    return found  # type: ignore[return-value]


def joined(chunks: list[TokenChunk]) -> tuple[list[int], list[float], list[int]]:
    return (
        [t for c in chunks for t in c.tokens.tolist()],
        [x for c in chunks for x in c.logprobs.tolist()],
        [v for c in chunks for v in c.versions.tolist()],
    )


async def test_streams_in_chunks_with_true_log_probs(engine: TorchEngine, models: tuple[Path, Path]) -> None:
    call = request("a", 30, seed=4, temperature=0.8)
    chunks = await frame_by_frame(engine, call)
    tokens, logprobs, versions = joined(chunks)
    assert [c.finish for c in chunks] == [None] * 7 + ["length"]
    assert len(tokens) == 30
    assert set(versions) == {0}
    expected = plain_logprobs(models[0], call.prompt, tokens, 0.8)
    assert max(abs(a - b) for a, b in zip(expected, logprobs, strict=True)) < TOLERANCE


async def test_people_get_lines_of_json_that_say_the_same(engine: TorchEngine) -> None:
    call = request("a", 10, seed=4)
    tokens, logprobs, versions = joined(await collect(engine, call))
    async with aiohttp.ClientSession() as session, session.post(f"{engine.address.url}/generate", data=request_body(call)) as answer:
        lines = [orjson.loads(line) for line in (await answer.read()).splitlines() if line]
    assert [token for line in lines for token in line["t"]] == tokens
    assert max(abs(a - b) for a, b in zip(logprobs, [value for line in lines for value in line["l"]], strict=True)) < TOLERANCE
    assert [version for line in lines for version, count in line["v"] for _ in range(count)] == versions
    assert [line["f"] for line in lines] == [None] * (len(lines) - 1) + ["length"]


async def test_closing_the_iterator_frees_the_row_at_once(engine: TorchEngine) -> None:
    client = connect(engine.address)
    before = (await asyncio.to_thread(engine.health, 30.0))["tokens"]
    stream = client.generate(request("long", 200))
    await anext(stream)
    assert (await asyncio.to_thread(engine.health, 30.0))["active"] == 1
    await stream.aclose()
    async with asyncio.timeout(30):
        while (health := await asyncio.to_thread(engine.health, 30.0))["active"]:
            pass
    assert 0 < health["tokens"] - before < 200, "long before the call would have ended by itself"
    await client.close()


async def test_what_can_never_be_served_is_refused(engine: TorchEngine) -> None:
    for bad in (GenerateRequest("w", [1] * 256, Sampling(1)), GenerateRequest("v", [VOCABULARY], Sampling(1))):
        with pytest.raises(RequestRefused):
            await collect(engine, bad)


async def test_pause_faults_what_is_in_flight_and_refuses_until_resume(engine: TorchEngine) -> None:
    client = connect(engine.address)
    stream = client.generate(request("p", 200))
    await anext(stream)
    await asyncio.to_thread(engine.pause, 5.0)
    with pytest.raises(EngineFault, match="paused"):
        async for _ in stream:
            pass
    with pytest.raises(EngineFault, match="paused"):
        await collect(engine, request("q", 3))
    await asyncio.to_thread(engine.resume, 5.0)
    assert len(joined(await collect(engine, request("q", 3)))[0]) == 3
    await client.close()


async def test_update_in_flight_and_release_and_restore(engine: TorchEngine, models: tuple[Path, Path]) -> None:
    client = connect(engine.address)
    call = request("u", 200, seed=1)
    stream = client.generate(call)
    chunks = [await anext(stream)]
    await asyncio.to_thread(engine.update_weights, models[1], 7, 30.0)
    chunks += [chunk async for chunk in stream]
    tokens, logprobs, versions = joined(chunks)
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    by_version = {v: plain_logprobs(m, call.prompt, tokens) for v, m in ((0, models[0]), (7, models[1]))}
    assert max(abs(by_version[v][i] - x) for i, (v, x) in enumerate(zip(versions, logprobs, strict=True))) < TOLERANCE

    health = await asyncio.to_thread(engine.health, 5.0)
    assert min(health["slot_bytes"], health["prefix_bytes"]) > 0
    await asyncio.to_thread(engine.release, 5.0)
    health = await asyncio.to_thread(engine.health, 5.0)
    assert [health[name] for name in ("active", "waiting", "slot_bytes", "prefix_bytes")] == [0, 0, 0, 0]
    with pytest.raises(EngineFault):
        await collect(engine, call)
    with pytest.raises(EngineFault, match="answered 400 to restore"):
        await asyncio.to_thread(engine.restore, models[0].parent, 8, 5.0)
    await asyncio.to_thread(engine.restore, models[0], 0, 5.0)
    fresh = joined(await collect(engine, call))
    assert set(fresh[2]) == {0}
    expected = plain_logprobs(models[0], call.prompt, fresh[0])
    assert max(abs(a - b) for a, b in zip(expected, fresh[1], strict=True)) < TOLERANCE
    await client.close()


@pytest.mark.job
async def test_killed_engine_is_a_fault_at_both_sides(models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = start_engine(EngineSpec("torch", models[0], 0, 8, 256, tmp_path / "log", options={"flush": 1}), 60.0)
    client = connect(engine.address)
    stream = client.generate(request("k", 200))
    await anext(stream)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFault):
        async for _ in stream:
            pass
    while engine.alive():
        await asyncio.sleep(0.01)
    with pytest.raises(EngineFault, match="ended with status -9"):
        await asyncio.to_thread(engine.update_weights, models[1], 1, 5.0)
    engine.stop()
    await client.close()


async def test_it_holds_its_rows(engine: TorchEngine, tmp_path: Path) -> None:
    held = engine.holding(1.0)
    assert (held.executions, held.kv_tokens) == (engine.address.capacity, engine.address.capacity * engine.address.window)
    assert rows_of(EngineSpec("torch", tmp_path, 0, 0, 64, tmp_path / "log", options={"rows": 5})) == 5
    with pytest.raises(ConfigError, match=r"rollout\.capacity = 0 without rollout\.options\.rows"):
        rows_of(EngineSpec("torch", tmp_path, 0, 0, 64, tmp_path / "log"))


def test_bad_starts_say_why(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.options\.flushh"):
        start_engine(EngineSpec("torch", models[0], 0, 8, 256, tmp_path / "log", options={"flushh": 1}), 60.0)
    with pytest.raises(ConfigError, match="torch or vllm"):
        start_engine(EngineSpec("tgi", models[0], 0, 8, 256, tmp_path / "log"), 60.0)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        start_engine(EngineSpec("torch", tmp_path, 0, 8, 256, tmp_path / "log"), 60.0)


def test_a_model_that_this_engine_can_not_serve_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    mamba = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1)
    path = save_random(tmp_path / "mamba", 0, mamba, MambaForCausalLM)
    with pytest.raises(ConfigError, match=r"model\.path: .*; use rollout\.engine = vllm"):
        start_engine(EngineSpec("torch", path, 0, 2, 64, tmp_path / "engine.log"), 60.0)


async def test_weights_that_are_received_are_those_of_the_files_or_nothing_changes(engine: TorchEngine, models: tuple[Path, Path]) -> None:
    call = request("r", 40, seed=1, temperature=0.0)
    await asyncio.to_thread(engine.update_weights, models[1], 3, 10.0)
    from_files = joined(await collect(engine, call))
    old, new = (published(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) for path in models)
    await asyncio.to_thread(engine.update_weights, models[0], 0, 10.0)
    before = joined(await collect(engine, call))

    with half_sender(4, new) as source, pytest.raises(NotReceived, match="did not arrive whole"):
        await asyncio.to_thread(engine.receive_weights, source, 4, 10.0)
    with pytest.raises(NotReceived, match=r"weights that are not those of .*missing_keys"):
        await sent(engine, old[1:], 4)
    assert_same(joined(await collect(engine, call)), before)

    await sent(engine, new, 4)
    assert_same(joined(await collect(engine, call)), (from_files[0], from_files[1], [4] * 40))
    await sent(engine, old, 0)
    assert_same(joined(await collect(engine, call)), before)


def assert_same(found: tuple[list[int], list[float], list[int]], expected: tuple[list[int], list[float], list[int]]) -> None:
    """Tokens and versions; log-probs up to the rounding of a prompt that is known already."""
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


async def sent(engine: TorchEngine, weights: Weights, version: int) -> None:
    sender = Sender("127.0.0.1", version, weights)
    try:
        await asyncio.to_thread(engine.receive_weights, sender.source, version, 10.0)
    finally:
        sender.close()
