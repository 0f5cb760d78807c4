"""Log-probs and tokens of the batch are those of a plain transformers forward pass, whoever joins, leaves, hits a prefix or updates."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from gyre_hpc.engines.protocol import GenerateRequest, Sampling
from gyre_hpc.engines.torch_batch import Batch, Limits
from gyre_hpc.engines.torch_model import SlotModel, UnsupportedModel
from tests.engines.models import VOCABULARY, plain_logprobs, save_random

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Outcome:
    """Everything that a batch has handed out for one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: str | None = None


def advance(batch: Batch, outcomes: dict[str, Outcome]) -> None:
    for request_id, chunk in batch.step():
        outcome = outcomes.setdefault(request_id, Outcome())
        assert outcome.finish is None
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions)
        outcome.tokens.extend(chunk.tokens.tolist())
        outcome.logprobs.extend(chunk.logprobs.tolist())
        outcome.versions.extend(chunk.versions.tolist())
        outcome.finish = chunk.finish


def run(batch: Batch) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    while batch.busy:
        advance(batch, outcomes)
    return outcomes


def load(path: Path, window: int = 256) -> SlotModel:
    return SlotModel(path, "float32", window, CPU)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def assert_plain(path: Path, request: GenerateRequest, outcome: Outcome) -> None:
    expected = plain_logprobs(path, request.prompt, outcome.tokens, request.sampling.temperature)
    assert max(abs(a - b) for a, b in zip(expected, outcome.logprobs, strict=True)) < TOLERANCE


def test_ragged_calls_joining_and_leaving_agree_with_plain_forward(models: tuple[Path, Path]) -> None:
    rng = random.Random(0)
    batch = Batch(load(models[0]), 3, Limits(rows=5, window=256, flush=3, prefill=64))
    requests = [
        GenerateRequest(str(i), prompt(rng, rng.randrange(1, 90)), Sampling(rng.randrange(1, 30), rng.choice([0.0, 0.7, 1.0]), seed=i))
        for i in range(14)
    ]
    outcomes: dict[str, Outcome] = {}
    for request in requests:
        assert batch.refusal(request) is None
        batch.add(request)
        advance(batch, outcomes)
    while batch.busy:
        advance(batch, outcomes)
    for request in requests:
        outcome = outcomes[request.request_id]
        assert (len(outcome.tokens), outcome.finish) == (request.sampling.max_tokens, "length")
        assert set(outcome.versions) == {3}
        assert_plain(models[0], request, outcome)


def test_a_turn_that_extends_an_earlier_one_reuses_its_kv(models: tuple[Path, Path]) -> None:
    rng = random.Random(1)
    model = load(models[0])
    warm, cold = Batch(model, 0, Limits(4, 256)), Batch(model, 0, Limits(4, 256, prefix_bytes=0))
    conversation = prompt(rng, 40)
    for turn in range(3):
        request = GenerateRequest(f"t{turn}", list(conversation), Sampling(20, seed=turn))
        for batch in (warm, cold):
            batch.add(request)
        a, b = run(warm)[request.request_id], run(cold)[request.request_id]
        assert a.tokens == b.tokens
        assert_plain(models[0], request, a)
        conversation += a.tokens + prompt(rng, 7)
    assert warm.counts["prefix_hits"] == 2
    assert cold.counts["prefix_hits"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continued_at_any_token_gives_the_same(models: tuple[Path, Path], temperature: float) -> None:
    rng = random.Random(2)
    model = load(models[0])
    whole = GenerateRequest("w", prompt(rng, 20), Sampling(24, temperature, top_p=0.9, top_k=50, seed=11))
    batch = Batch(model, 0, Limits(32, 256))
    batch.add(whole)
    expected = run(batch)["w"].tokens
    cuts = range(1, 24)
    for cut in cuts:
        sampling = Sampling(24 - cut, temperature, top_p=0.9, top_k=50, seed=11)
        batch.add(GenerateRequest(str(cut), whole.prompt + expected[:cut], sampling, position=cut))
    rest = run(batch)
    assert [expected[:cut] + rest[str(cut)].tokens for cut in cuts] == [expected] * len(cuts)


def test_update_in_flight_labels_and_computes_each_token_under_its_version(models: tuple[Path, Path]) -> None:
    rng = random.Random(3)
    batch = Batch(load(models[0]), 0, Limits(4, 256, flush=1))
    requests = [GenerateRequest(str(i), prompt(rng, 30), Sampling(20, seed=i)) for i in range(6)]
    for request in requests:
        batch.add(request)
    outcomes: dict[str, Outcome] = {}
    for _ in range(6):
        advance(batch, outcomes)
    batch.replace(load(models[1]), 1)
    while batch.busy:
        advance(batch, outcomes)
    mixed = 0
    for request in requests:
        outcome = outcomes[request.request_id]
        old = outcome.versions.count(0)
        assert outcome.versions == [0] * old + [1] * (20 - old)
        mixed += 0 < old < 20
        by_version = [plain_logprobs(path, request.prompt, outcome.tokens) for path in models]
        expected = [by_version[v][i] for i, v in enumerate(outcome.versions)]
        assert max(abs(a - b) for a, b in zip(expected, outcome.logprobs, strict=True)) < TOLERANCE
    assert mixed == 4


def test_stop_token_ends_and_is_included_and_the_window_is_a_length(models: tuple[Path, Path]) -> None:
    rng = random.Random(4)
    batch = Batch(load(models[0], 64), 0, Limits(4, 64))
    start = prompt(rng, 10)
    batch.add(GenerateRequest("free", start, Sampling(20, seed=1)))
    free = run(batch)["free"].tokens
    stop = free[7]
    batch.add(GenerateRequest("stop", start, Sampling(20, seed=1, stop=(stop, 299))))
    batch.add(GenerateRequest("full", prompt(rng, 60), Sampling(20)))
    outcomes = run(batch)
    assert outcomes["stop"].tokens == free[: free.index(stop) + 1]
    assert outcomes["stop"].finish == "stop"
    assert (len(outcomes["full"].tokens), outcomes["full"].finish) == (4, "length")
    refused = [[], [0] * 64, [VOCABULARY], [-1]]
    assert all(batch.refusal(GenerateRequest("r", bad, Sampling(1))) for bad in refused)
    assert batch.refusal(GenerateRequest("r", [0], Sampling(0)))


def test_cancel_frees_rows_and_leaves_the_others_alone(models: tuple[Path, Path]) -> None:
    rng = random.Random(5)
    batch = Batch(load(models[0]), 0, Limits(4, 256))
    requests = [GenerateRequest(str(i), prompt(rng, 15), Sampling(12, seed=i)) for i in range(6)]
    for request in requests:
        batch.add(request)
    outcomes: dict[str, Outcome] = {}
    advance(batch, outcomes)
    for gone in ("0", "2", "5", "unknown"):
        batch.cancel(gone)
    while batch.busy:
        advance(batch, outcomes)
    assert {k for k, v in outcomes.items() if v.finish} == {"1", "3", "4"}
    for i in (1, 3, 4):
        assert_plain(models[0], requests[i], outcomes[str(i)])


def test_other_architectures(tmp_path: Path) -> None:
    """Learned positions; a sliding window on every layer; both kinds of layer. Longer than the window, where a wrong mask would show."""
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    kinds = {
        "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
        "mistral": (MistralForCausalLM, MistralConfig(**size, num_hidden_layers=2, num_key_value_heads=2, sliding_window=16)),
        "gemma3": (
            Gemma3ForCausalLM,
            Gemma3TextConfig(**size, num_hidden_layers=7, num_key_value_heads=1, sliding_window=16, query_pre_attn_scalar=8),
        ),
    }
    rng = random.Random(6)
    for name, (kind, config) in kinds.items():
        path = save_random(tmp_path / name, 0, config, kind)
        batch = Batch(load(path, 128), 0, Limits(3, 128))
        requests = [GenerateRequest(str(i), prompt(rng, 10 + 17 * i), Sampling(30, seed=i)) for i in range(3)]
        for request in requests:
            batch.add(request)
        outcomes = run(batch)
        for request in requests:
            assert_plain(path, request, outcomes[request.request_id])


def test_a_model_that_slots_would_compute_wrongly_is_refused(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = SlotModel._masks
    monkeypatch.setattr(SlotModel, "_masks", lambda self, positions, width: right(self, positions, width) * 0)
    with pytest.raises(UnsupportedModel, match="differ from a plain forward pass"):
        load(models[0])
