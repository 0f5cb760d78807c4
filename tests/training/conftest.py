"""A small causal LM on disk and random rows with a known number of executions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.training.rows import TrainRow

VOCABULARY = 61
TRAINING = {"tokens_per_microstep": 96, "lr": 1e-2, "warmup_steps": 2, "clip_low": 0.9, "clip_high": 1.2, "clip_grad": 0.5}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers, random but peaked enough that ratios and gradients are not all alike."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )
    directory: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture
def config() -> Config:
    return check({"training": TRAINING}, "test")


def make_rows(executions: int, seed: int = 0, spread: float = 0.3) -> list[TrainRow]:
    """One to three rows per execution; behaviour log-probs near -4 (uniform over the vocabulary) with some spread."""
    rng = np.random.default_rng(seed)
    rows: list[TrainRow] = []
    for _ in range(executions):
        lengths = rng.integers(2, 40, size=rng.integers(1, 4))
        masks = [rng.random(n) < 0.5 for n in lengths]
        for mask in masks:
            mask[0], mask[-1] = False, True
        total = sum(int(m.sum()) for m in masks)
        advantage = float(rng.normal())
        for n, mask in zip(lengths, masks, strict=True):
            rows.append(
                TrainRow(
                    tokens=rng.integers(0, VOCABULARY, n).astype(np.int32),
                    targets=mask,
                    logprobs=np.where(mask, rng.normal(-4.1, spread, n), np.nan).astype(np.float32),
                    versions=np.where(mask, rng.integers(0, 3, n), -1).astype(np.int32),
                    weight=1.0 / total,
                    advantage=advantage,
                )
            )
    return rows
