"""A real client end to end on a real engine: mini-swe-agent in its box, the gateway, vLLM on CPU with a small random model.

A model that learned nothing can't do the task; the client gives up after three answers without a call, as it does with any model. What is
shown: every token in the tree is one that vLLM sampled, with its log-prob, behind the prompt that the tree says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config

from gyre_hpc.engines.factory import connect, start_engine
from gyre_hpc.engines.protocol import EngineServer, EngineSpec, GenerateRequest, Sampling
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.engines.models import plain_logprobs, save_random
from tests.gateway.fakes import tiny_model
from tests.harness.clients.bench import bench
from trees.records import Fate, Role

pytestmark = [pytest.mark.harness, pytest.mark.vllm]
WINDOW = 16_384
"""Bytes are tokens here: the client's first prompt has about 6,000."""
LIMIT = 40
TOLERANCE = 1e-3
"""Of a log-prob (nats), over thousands of tokens in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights for the byte tokenizer, with room for a real client's prompt."""
    folder = tiny_model(tmp_path_factory.mktemp("bytes"))
    vocabulary = TurnRenderer(folder).vocabulary
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3Config(vocab_size=vocabulary, head_dim=32, max_position_embeddings=WINDOW, tie_word_embeddings=True, **shape)
    weights = save_random(folder / "weights", 0, config)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(weights / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    engine = start_engine(EngineSpec("vllm", model, 0, 2, WINDOW, log, options={"kv_gib": 1}), 400.0)
    yield engine
    engine.stop()


async def test_mini_swe_agent(tmp_path: Path, model: Path, server: EngineServer) -> None:
    sections = {"model": {"window": WINDOW}, "harness": {"max_tokens": LIMIT}}
    async with bench(tmp_path, TurnRenderer(model), "mini-swe-agent", sections, real=server.address) as made:
        ran = await made.run("Write a file. [task-1]", deadline=200.0)
        assert ran.code == 0, ran.output
        assert "RepeatedFormatError" in ran.output
        asked = [json.loads(seen.body) for seen in made.requests]
        tree, calls = made.tree(ran.execution), made.calls(ran)
        assert len(calls) == len(asked) == 3
        assert not tree.incomplete
        assert tree.columns is not None
        for call in calls:
            assert (call.role, call.fate) == (Role.MAIN, Fate.DELIVERED)
            assert call.difference in ("clean", "edit")
            prompt, sampled = tree.tokens_of(tree.path(call.prompt)).tolist(), tree.tokens_of([call.sampled]).tolist()
            assert 0 < len(sampled) <= LIMIT
            (column,) = tree.column_slices([call.sampled])
            assert set(tree.columns.versions[column].tolist()) == {0}
            expected = plain_logprobs(model, prompt, sampled)
            assert np.abs(tree.columns.logprobs[column] - expected).max() < TOLERANCE
        assert [body["max_tokens"] for body in asked] == [LIMIT] * 3


async def test_the_prompt_of_the_tree_is_that_of_the_engine(tmp_path: Path, model: Path, server: EngineServer) -> None:
    """Greedily: what the engine says to the tokens of the tree is what the tree has."""
    sections = {"model": {"window": WINDOW}, "harness": {"max_tokens": LIMIT}, "rollout": {"temperature": 0.0}}
    async with bench(tmp_path, TurnRenderer(model), "mini-swe-agent", sections, real=server.address) as made:
        ran = await made.run("Write a file. [task-1]", deadline=200.0)
        tree, calls = made.tree(ran.execution), made.calls(ran)
        prompt, sampled = tree.tokens_of(tree.path(calls[-1].prompt)).tolist(), tree.tokens_of([calls[-1].sampled]).tolist()
        client = connect(server.address)
        again: list[int] = []
        async for chunk in client.generate(GenerateRequest("again", prompt, Sampling(len(sampled), 0.0))):
            again.extend(chunk.tokens.tolist())
        await client.close()
        assert again == sampled
