"""Random models for engine tests, and the plain forward pass that engines are compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from gyre_hpc.engines import torch_server
from gyre_hpc.engines.protocol import EngineAddress

VOCABULARY = 300


def small_config(**changes: Any) -> Qwen3Config:
    """The shape of the tests' engines; `changes` are fields of it."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**{**shape, **changes})


def save_random(path: Path, seed: int, config: PretrainedConfig | None = None, kind: Any = Qwen3ForCausalLM) -> Path:
    """A model with weights so large that its distributions are far from uniform."""
    config = config or small_config()
    torch.manual_seed(seed)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


@cache
def _plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_logprobs(path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs (nats) of `tokens` after `prompt` by one transformers forward pass without any cache."""
    with torch.no_grad():
        logits = _plain(path)(torch.tensor([prompt + tokens]), use_cache=False).logits[0] / (temperature or 1.0)
    logp = logits.log_softmax(-1)
    first = len(prompt) - 1
    return [float(logp[first + i, token]) for i, token in enumerate(tokens)]


@asynccontextmanager
async def serving(model: Path, count: int, *, rows: int = 8, window: int = 256, flush: int = 2) -> AsyncIterator[list[EngineAddress]]:
    """Real torch engine servers, HTTP and model thread and all, inside this process: a process of its own takes seconds to import."""
    options = {"version": 0, "window": window, "threads": 1, "rows": rows, "flush": flush, "prefill": 512, "prefix-mb": 16}
    named = {"model": model, "host": "127.0.0.1", "dtype": "float32", "device": "cpu", **options}
    runners = [await torch_server.listen(torch_server.parse([f"--{k}={v}" for k, v in named.items()])) for _ in range(count)]
    try:
        yield [EngineAddress("torch", url, rows, window) for _, url in runners]
    finally:
        for runner, _ in runners:
            await runner.cleanup()
