"""Random models for engine tests, and the plain forward pass that engines are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 300


def save_random(path: Path, seed: int, config: PretrainedConfig | None = None, kind: Any = Qwen3ForCausalLM) -> Path:
    """A model with weights so large that its distributions are far from uniform."""
    config = config or Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return path


def plain_logprobs(path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs (nats) of `tokens` after `prompt` by one transformers forward pass without any cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0] / (temperature or 1.0)
    logp = logits.log_softmax(-1)
    first = len(prompt) - 1
    return [float(logp[first + i, token]) for i, token in enumerate(tokens)]
