"""`gyre gateway` before a real vLLM, started as its users start it: both wire forms, log-probs against a plain forward pass, versions."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import yaml

from gyre_hpc.engines.probe import Wanted, examine
from gyre_hpc.engines.upstream import AS_NAMES, OPENAI, Wire
from gyre_hpc.errors import ConfigError
from tests.engines.models import plain_logprobs, save_random, small_config
from tests.gateway.fakes import tiny_model
from tests.gateway.test_standalone import GO, gateway
from tests.ports import free_port
from trees.store import StoreReader

WINDOW = 900
VOCABULARY = 265
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights under the tiny tokenizer."""
    path = tiny_model(tmp_path_factory.mktemp("policy"))
    return save_random(path, 0, small_config(vocab_size=VOCABULARY, max_position_embeddings=1024, eos_token_id=258))


@pytest.fixture
async def server(weights: Path, tmp_path: Path) -> AsyncIterator[str]:
    """`vllm serve` with its defaults, but for what a CPU needs; weight versions by its development routes."""
    port = free_port()
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={weights}", f"--port={port}", "--host=127.0.0.1"]
    argv += [f"--max-model-len={WINDOW}", "--dtype=float32", "--enforce-eager", "--max-num-seqs=8", "--enable-scale-out"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with open(tmp_path / "vllm.log", "wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **environment}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(250):
            while True:
                assert process.returncode is None, (tmp_path / "vllm.log").read_text()[-2000:]
                try:
                    async with http.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def test_what_real_vllm_samples_is_what_is_recorded(server: str, weights: Path, tmp_path: Path) -> None:
    ids = [84, 104, 101, 32, 113]
    wanted = Wanted(WINDOW, 1.0, ids, lambda tokens: "", 10.0)
    assert (await examine(server, Wire(OPENAI, "", lambda: 0), wanted)).ids == AS_NAMES
    with pytest.raises(ConfigError, match="before the temperature"):
        await examine(server, Wire(OPENAI, "", lambda: 0), replace(wanted, temperature=0.5))
    with pytest.raises(ConfigError, match=f"has a context of {WINDOW} tokens"):
        await examine(server, Wire(OPENAI, "", lambda: 0), replace(wanted, window=WINDOW + 1))
    for kind in ("openai", "vllm"):
        folder = tmp_path / kind
        folder.mkdir()
        config = folder / "record.yaml"
        upstream = {"urls": [server], "kind": kind, "version_path": "/weight_info", "poll": 0.1}
        tree = {"run": {"dir": str(folder / "run")}, "model": {"path": str(weights), "window": WINDOW}, "upstream": upstream}
        config.write_text(yaml.safe_dump(tree))
        async with aiohttp.ClientSession() as http, http.post(f"{server}/update_weight_version", json={"new_version": "41"}) as answer:
            assert answer.status == 200
        async with gateway(config) as running:
            async with asyncio.timeout(10):
                while (await running.api("/api/status"))["version"] != 41:
                    await asyncio.sleep(0.05)
            (item,) = (await running.api("/api/groups", {"task": "t"}))["executions"]
            turns = await conversation(item)
            assert (await running.api(f"/api/executions/{item['execution']}/end", {"score": 1.0}))["calls"] == turns
            assert (await running.stop())[0] == 0
        with StoreReader(running.paths.trees) as reader:
            tree_read = reader.tree(item["execution"])
        assert tree_read.columns is not None
        assert len(tree_read.calls) == turns
        for call in tree_read.calls.values():
            (span,) = tree_read.column_slices([call.sampled])
            prompt, tokens = tree_read.tokens_of(tree_read.path(call.prompt)).tolist(), tree_read.columns.tokens[span].tolist()
            expected = plain_logprobs(weights, prompt, tokens, 1.0)
            assert max(abs(a - b) for a, b in zip(expected, tree_read.columns.logprobs[span].tolist(), strict=True)) < 1e-3
            assert set(tree_read.columns.versions[span].tolist()) == {41}


async def conversation(item: dict[str, Any]) -> int:
    """Three calls by the official SDKs, two of them of one conversation; how many."""
    claude = anthropic.AsyncAnthropic(base_url=item["anthropic_base_url"], api_key="none", max_retries=0)
    async with claude.messages.stream(model="m", max_tokens=40, messages=GO) as stream:  # type: ignore[arg-type]
        first = await stream.get_final_message()
    content = [block.model_dump() for block in first.content]
    turns = [*GO, *([{"role": "assistant", "content": content}] if content else []), {"role": "user", "content": "on"}]
    await claude.messages.create(model="m", max_tokens=40, messages=turns)  # type: ignore[arg-type]
    gpt = openai.AsyncOpenAI(base_url=item["openai_base_url"], api_key="none", max_retries=0)
    await gpt.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=30)
    return 3
