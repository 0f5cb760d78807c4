"""Chunks of targets give what all of them at once give, and never a tensor of all targets times the vocabulary."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gyre_hpc.training.head import target_logprobs
from gyre_hpc.training.loss import Objective, batch_loss
from gyre_hpc.training.rows import Batch, stack
from tests.training.conftest import VOCABULARY, make_rows

RULE = Objective(temperature=0.7, token_cap=1.6, clip_low=0.9, clip_high=1.2)
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch() -> Batch:
    (batch,) = stack(make_rows(4, 4), 10_000)
    return batch


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch.ids), torch.from_numpy(batch.row), torch.from_numpy(batch.position)


def apart(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The largest difference, in units of the largest entry."""
    scale = max(float(e.abs().max()) for e in expected)
    return max(float((e.double() - g.double()).abs().max()) for e, g in zip(expected, got, strict=True)) / scale


@pytest.mark.parametrize("chunk", [1, 7, 61, 10_000])
def test_any_chunk_gives_the_same_loss_sums_and_gradients(model: Any, batch: Batch, chunk: int) -> None:
    parameters = list(model.parameters())
    loss, sums = batch_loss(model, batch, RULE, CPU, chunk=len(batch.row))
    expected = torch.autograd.grad(loss, parameters)
    loss, got = batch_loss(model, batch, RULE, CPU, chunk=chunk)
    assert got.array() == pytest.approx(sums.array(), rel=1e-6)
    assert apart(expected, torch.autograd.grad(loss, parameters)) < 1e-6


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_they_are_the_log_probs_that_the_whole_forward_gives(model: Any, batch: Batch, chunk: int) -> None:
    ids, row, position = tensors(batch)
    with torch.no_grad():
        everywhere = torch.log_softmax(model(input_ids=ids).logits[row, position - 1] / 0.7, -1)
        logprobs, entropy = target_logprobs(model, ids, row, position, 0.7, chunk)
    assert torch.allclose(logprobs, everywhere.gather(1, ids[row, position, None])[:, 0], rtol=0, atol=2e-6)
    assert float(entropy) == pytest.approx(float(torch.distributions.Categorical(logits=everywhere).entropy().sum()), rel=1e-5)


class Widest(TorchDispatchMode):
    """The most rows of `width` entries that any operation made at once."""

    def __init__(self, width: int, weights: tuple[int, ...]) -> None:
        super().__init__()
        self.width, self.weights, self.rows = width, weights, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape not in (self.weights, self.weights[::-1]):
                self.rows = max(self.rows, -(-tensor.numel() // self.width))
        return out


def test_no_tensor_of_all_targets_times_the_vocabulary_ever_lives() -> None:
    width = 4099  # no other tensor comes near it
    model: Any = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "vocab_size": width})).eval()
    (batch,) = stack(make_rows(4, 4), 10_000)
    for chunk, expected in ((5, 5), (None, len(batch.row))):
        with Widest(width, (width, 32)) as widest:
            loss, _ = batch_loss(model, batch, RULE, CPU, chunk=chunk)
            torch.autograd.grad(loss, list(model.parameters()))
        assert widest.rows == expected


def test_a_short_batch_is_computed_once(model: Any, batch: Batch) -> None:
    seen: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    logprobs, _ = target_logprobs(model, *tensors(batch))
    torch.autograd.grad(logprobs.sum(), list(model.parameters()))
    hook.remove()
    assert seen == [(1, len(batch.row), VOCABULARY)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    ],
)
def test_what_a_model_does_around_its_head_is_kept(kind: str, settings: dict[str, Any], batch: Batch) -> None:
    torch.manual_seed(0)
    known = {k: v for k, v in SMALL.items() if k != "head_dim" or kind not in ("gpt2", "opt")}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known, **settings)).eval()
    ids, row, position = tensors(batch)
    parameters = list(model.parameters())
    plain = torch.log_softmax(model(input_ids=ids).logits[row, position - 1].float(), -1).gather(1, ids[row, position, None])[:, 0]
    chunked, _ = target_logprobs(model, ids, row, position, chunk=9)
    outer = torch.linspace(-1, 1, len(row))
    assert torch.allclose(plain, chunked, rtol=0, atol=2e-6)
    expected, got = (torch.autograd.grad((x * outer).sum(), parameters, allow_unused=True) for x in (plain, chunked))
    assert [g is None for g in got] == [e is None for e in expected]
    assert apart([e for e in expected if e is not None], [g for g in got if g is not None]) < 2e-6


def test_chunks_of_a_bfloat16_head_are_added_up_in_float32(model_dir: Path, batch: Batch) -> None:
    exact: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).float().eval()
    exact.lm_head.weight = torch.nn.Parameter(exact.lm_head.weight.detach().clone())  # untied: the head's part alone
    rounded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.detach().clone())

    def of_head(model: Any, chunk: int) -> torch.Tensor:
        logprobs, _ = target_logprobs(model, *tensors(batch), chunk=chunk)
        return torch.autograd.grad(logprobs.sum(), model.lm_head.weight)[0]

    whole, single = (apart([of_head(exact, 10_000)], [of_head(rounded, chunk)]) for chunk in (10_000, 1))
    assert single < 1.5 * whole


def test_nothing_of_it_stays_on_the_model(model: Any, batch: Batch) -> None:
    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    before = hooks()
    logprobs, _ = target_logprobs(model, *tensors(batch), chunk=3)
    failing = model.lm_head.register_forward_hook(lambda _module, _args, _out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logprobs.sum().backward()
    with pytest.raises(ZeroDivisionError):
        target_logprobs(model, *tensors(batch), chunk=3)
    failing.remove()
    assert hooks() == before
    assert "forward" not in model.model.__dict__


def test_the_hidden_states_of_all_positions_do_not_wait_for_the_backward(model: Any, batch: Batch) -> None:
    out: list[weakref.ref[torch.UntypedStorage]] = []
    hook = model.model.norm.register_forward_hook(lambda _module, _args, hidden: out.append(weakref.ref(hidden.untyped_storage())))
    logprobs, _ = target_logprobs(model, *tensors(batch), chunk=9)
    hook.remove()
    assert logprobs.requires_grad
    assert out[0]() is None


def test_a_model_that_calls_its_head_otherwise_is_refused(model_dir: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(Qwen3ForCausalLM):
        """Logits of the last position alone."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[:, -1:]
            return out

    class Bodiless(Qwen3ForCausalLM):
        """A body that is called behind the back of whoever listens."""

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            out = self.model.forward(input_ids=input_ids, use_cache=False)
            out.logits = self.lm_head(out.last_hidden_state)
            return out

    with pytest.raises(ValueError, match=r"Last gave logits \(1, 1, 61\)"):
        target_logprobs(Last.from_pretrained(model_dir), *tensors(batch))
    with pytest.raises(ValueError, match="Bodiless calls no body"):
        target_logprobs(Bodiless.from_pretrained(model_dir), *tensors(batch), chunk=3)
