"""Real engines in a broadcast: they compute with the new weights as after loading them from files, or with the old ones, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre_hpc.engines import weight_broadcast, weight_groups
from gyre_hpc.engines.factory import connect, start_engine
from gyre_hpc.engines.protocol import EngineFault, EngineServer, EngineSpec, GenerateRequest, NotReceived, Sampling
from gyre_hpc.engines.torch_engine import TorchEngine
from gyre_hpc.engines.vllm_engine import VllmEngine
from gyre_hpc.engines.weight_broadcast import Broadcaster
from gyre_hpc.engines.weight_groups import Collector
from gyre_hpc.engines.weight_member import attend
from gyre_hpc.engines.weight_stream import Weights
from gyre_hpc.training.actor import published
from tests.engines.models import VOCABULARY, plain_logprobs

PROMPT = [number % VOCABULARY for number in range(40)]
CALL = GenerateRequest("call", PROMPT, Sampling(30, temperature=0.0))
Answer = tuple[list[int], list[float], set[int]]


@pytest.fixture
def sender() -> Iterator[Broadcaster]:
    made = Broadcaster(bucket=20_000)
    yield made
    made.close()


def weights_of(path: Path) -> Weights:
    return published(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


async def answer(engine: EngineServer) -> Answer:
    client = connect(engine.address)
    try:
        chunks = [chunk async for chunk in client.generate(CALL)]
    finally:
        await client.close()
    return (
        [token for chunk in chunks for token in chunk.tokens.tolist()],
        [value for chunk in chunks for value in chunk.logprobs.tolist()],
        {version for chunk in chunks for version in chunk.versions.tolist()},
    )


def assert_same(found: Answer, expected: Answer, version: int) -> None:
    assert (found[0], found[2]) == (expected[0], {version})
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


async def broadcast(sender: Broadcaster, engine: EngineServer, weights: Weights, version: int, beside: Collector | None = None) -> None:
    """Into `engine`, and another member if there is one, whose own failure is not looked at."""
    source = sender.offer("127.0.0.1", version, weights, 1 if beside is None else 2, 10.0)
    with ThreadPoolExecutor(1) as pool:
        other: Future[None] | None = None if beside is None else pool.submit(attend, source, version, 20.0, "beside", beside)
        await asyncio.to_thread(engine.receive_weights, source, version, 40.0)
        if other is not None:
            other.result()
    sender.withdraw()


async def test_a_torch_engine_has_the_files_weights_or_its_old_ones(
    engine: TorchEngine, models: tuple[Path, Path], sender: Broadcaster
) -> None:
    old, new = map(weights_of, models)
    await asyncio.to_thread(engine.update_weights, models[1], 3, 10.0)
    from_files = await answer(engine)
    await asyncio.to_thread(engine.update_weights, models[0], 0, 10.0)
    before = await answer(engine)

    with pytest.raises(NotReceived, match=r"weights that are not those of .*missing_keys"):
        await broadcast(sender, engine, old[1:], 4)
    assert_same(await answer(engine), before, 0)
    beside = Collector()
    await broadcast(sender, engine, new, 4, beside)
    assert_same(await answer(engine), from_files, 4)
    assert all(torch.equal(beside.weights[name], tensor) for name, tensor in new)
    await broadcast(sender, engine, old, 0, beside)
    assert_same(await answer(engine), before, 0)


@pytest.fixture(scope="module")
def vllm(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    engine = start_engine(EngineSpec("vllm", models[0], 0, 8, 256, log, options={"kv_gib": 1}), 280.0)
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.stop()


def breaking(after: int) -> Callable[[weight_groups.Group, Weights], None]:
    """A sender that dies of something after so many tensors."""

    def send(group: weight_groups.Group, weights: Weights) -> None:
        real_send(group, weights[:after])
        raise RuntimeError("out of memory")

    real_send = weight_groups.send
    return send


@pytest.mark.vllm
async def test_vllm_computes_with_one_version_or_not_at_all(
    vllm: VllmEngine, models: tuple[Path, Path], sender: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = map(weights_of, models)
    await asyncio.to_thread(vllm.update_weights, models[1], 1, 30.0)
    from_files = await answer(vllm)
    await asyncio.to_thread(vllm.update_weights, models[0], 2, 30.0)
    before = await answer(vllm)
    assert before[0] != from_files[0]

    beside, groups = Collector(), []
    for version, weights, expected in ((3, new, from_files), (4, old, before), (5, new, from_files)):
        await broadcast(sender, vllm, weights, version, beside)
        assert_same(await answer(vllm), expected, version)
        groups.append(dict(sender.kept))
    assert groups == [groups[0]] * 3
    assert list(groups[0]) == ["gloo"]
    logprobs = await asyncio.to_thread(vllm.logprobs, PROMPT, 10.0)
    assert logprobs == pytest.approx(plain_logprobs(models[1], PROMPT[:1], PROMPT[1:]), abs=1e-4)

    with monkeypatch.context() as patched:
        patched.setattr(weight_broadcast.weight_groups, "send", breaking(8))
        with pytest.raises(NotReceived, match="out of memory"):
            await broadcast(sender, vllm, old, 6)
    with pytest.raises(EngineFault, match="it must load them first"):
        await asyncio.to_thread(vllm.resume, 10.0)
    with pytest.raises(EngineFault, match="503"):
        await answer(vllm)
    await asyncio.to_thread(vllm.update_weights, models[0], 6, 30.0)
    assert_same(await answer(vllm), before, 6)
    await broadcast(sender, vllm, new, 7)
    assert_same(await answer(vllm), from_files, 7)
    assert sender.kept != groups[0]
