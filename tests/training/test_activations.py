"""Layers that are computed again give the same bits, as many of them as the budget leaves, and keep their inputs only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from gyre_hpc import memory
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.training.activations import Mode, decoder_layers, recompute_layers, share_of_free
from gyre_hpc.training.actor import Satellite
from gyre_hpc.training.loading import load, skeleton
from gyre_hpc.training.loss import Objective, batch_loss
from gyre_hpc.training.rows import Batch, stack
from tests.training.conftest import make_rows
from tests.training.test_head import SMALL

RULE = Objective(temperature=1.0, token_cap=5.0, clip_low=0.5, clip_high=2.0)
CPU = torch.device("cpu")
LAYERS = 4
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {"sliding_window": 8},
    "bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},  # its layers ask whether they are in training by themselves
}


@pytest.fixture(scope="module")
def batch() -> Batch:
    (batch,) = stack(make_rows(4, 4), 10_000)
    return batch


def make(kind: str = "qwen3") -> Any:
    torch.manual_seed(0)
    shape = {**SMALL, "num_hidden_layers": LAYERS, **KINDS[kind]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).eval()


def gradients(model: Any, batch: Batch) -> list[torch.Tensor]:
    loss, _ = batch_loss(model, batch, RULE, CPU)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def kept_bytes(model: Any, batch: Batch) -> int:
    """What autograd keeps of a forward beside the weights, by its own account."""
    seen = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = batch_loss(model, batch, RULE, CPU)
    del loss
    return sum(seen.values())


@pytest.mark.parametrize(("kind", "mode"), [("qwen3", "offload"), *((kind, mode) for kind in KINDS for mode in (True, "auto"))])
def test_gradients_are_the_same_bits(kind: str, mode: Mode, batch: Batch) -> None:
    model = make(kind)
    expected, names = gradients(model, batch), list(model.state_dict())
    assert recompute_layers(model, mode, lambda _device: 2_000_000) == LAYERS
    got = gradients(model, batch)
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))
    assert list(model.state_dict()) == names


def runs(model: Any, batch: Batch) -> list[int]:
    """How often each layer's attention ran in a forward and its backward."""
    counts = [0] * LAYERS

    def counter(index: int) -> Any:
        def ran(*_: Any) -> None:
            counts[index] += 1

        return ran

    hooks = [layer.self_attn.register_forward_hook(counter(i)) for i, layer in enumerate(decoder_layers(model))]
    gradients(model, batch)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize(
    ("mode", "layers_that_fit", "expected"),
    [
        (False, 0, [1, 1, 1, 1]),
        (True, 9, [2, 2, 2, 2]),
        ("offload", 9, [2, 2, 2, 2]),
        ("auto", 0.5, [2, 2, 2, 2]),
        ("auto", 2.5, [1, 1, 2, 2]),
        ("auto", 9, [1, 1, 1, 1]),
    ],
)
def test_as_many_layers_as_fit_keep_what_they_computed(mode: Mode, layers_that_fit: float, expected: list[int], batch: Batch) -> None:
    model = make()
    one = (kept_bytes(model, batch) - kept_bytes(_without_layers(make()), batch)) / LAYERS
    budget = layers_that_fit * one + LAYERS * batch.ids.size * SMALL["hidden_size"] * 4  # every layer's input is there in any case
    recompute_layers(model, mode, lambda _device: budget)
    assert runs(model, batch) == expected
    assert runs(model, batch) == expected  # each forward begins anew


def test_a_layer_that_is_computed_again_keeps_its_input_only(batch: Batch) -> None:
    model = make()
    without = kept_bytes(_without_layers(make()), batch)
    kept = kept_bytes(model, batch) - without
    recompute_layers(model, True)
    inputs = LAYERS * batch.ids.size * SMALL["hidden_size"] * 4
    assert kept_bytes(model, batch) - without <= inputs
    assert kept > 10 * inputs


def _without_layers(model: Any) -> Any:
    model.model.layers = model.model.layers[:0]
    return model


def test_without_gradients_nothing_is_kept_or_asked(batch: Batch) -> None:
    model = make()
    recompute_layers(model, "auto", lambda _device: 1 / 0)
    with torch.no_grad():
        batch_loss(model, batch, RULE, CPU)
    with pytest.raises(ZeroDivisionError):
        batch_loss(model, batch, RULE, CPU)


def test_what_was_counted_is_freed_without_the_collector(batch: Batch) -> None:
    model = make()
    recompute_layers(model, "auto", lambda _device: float("inf"))
    inner: list[weakref.ref[torch.Tensor]] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: inner.append(weakref.ref(out)))
    gc.disable()
    try:
        loss, _ = batch_loss(model, batch, RULE, CPU)
        del loss
        assert inner[0]() is None
    finally:
        gc.enable()


def test_layers_are_found_by_their_mark_or_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Block(torch.nn.Linear):
        pass

    class Unmarked(torch.nn.Sequential):
        _no_split_modules = ("Block",)

    model = make()
    assert decoder_layers(model) == list(model.model.layers)
    blocks = Unmarked(Block(2, 2), torch.nn.Linear(2, 2), Block(2, 2))
    assert decoder_layers(blocks) == [blocks[0], blocks[2]]
    assert recompute_layers(torch.nn.Linear(2, 2), True) == 0
    assert "no decoder layers found" in caplog.text
    caplog.clear()
    assert recompute_layers(torch.nn.Linear(2, 2), False) == 0
    assert not caplog.text


def test_the_budget_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1600)
    assert share_of_free(CPU) == 100.0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (700, 10_000))
    assert share_of_free(torch.device("cuda", 0)) == 200.0


def test_the_kind_of_attention_is_the_configuration_s(model_dir: Path, batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    def loaded(kind: str) -> Any:
        return load(model_dir, check({"training": {"attention": kind}}, "test"))

    default = loaded("")
    assert not caplog.text
    eager = loaded("eager")
    assert caplog.text.count("attention is eager") == 1
    skeleton(model_dir, check({"training": {"attention": "eager"}}, "test"))  # the rank that reads the model has said so
    assert caplog.text.count("attention is eager") == 1
    assert (default.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    for expected, got in zip(gradients(default, batch), gradients(eager, batch), strict=True):
        assert torch.allclose(expected, got, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match=r"with training\.attention = fast: .*; name another kind"):
        loaded("fast")


@pytest.fixture
def alone() -> Iterator[None]:
    """A torch.distributed world of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mode", [True, "auto"])
def test_shards_are_there_when_layers_and_chunks_are_computed_again(mode: Mode, alone: None, batch: Batch) -> None:
    """FSDP2, with modules inside the layers that are gathered by themselves; targets in chunks."""
    plain, model = make("qwen3_moe"), make("qwen3_moe")
    batch_loss(plain, batch, RULE, CPU)[0].backward()
    recompute_layers(model, mode, lambda _device: float("inf"))
    mesh = init_device_mesh("cpu", (1,))
    for layer in decoder_layers(model):
        fully_shard(layer.mlp.gate, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ran: list[int] = []
    decoder_layers(model)[0].self_attn.register_forward_hook(lambda *_: ran.append(1))
    batch_loss(model, batch, RULE, CPU, chunk=9)[0].backward()
    assert len(ran) == 2, "with something gathered inside a layer is computed again whatever the budget"
    for expected, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(expected.grad, got.grad.full_tensor(), rtol=1e-5, atol=1e-7)


def test_a_loaded_model_has_it_and_writes_the_same_files(model_dir: Path, tmp_path: Path) -> None:
    plain, again = (Satellite(model_dir, check({"training": {"activation_checkpointing": on}}, "test")) for on in (False, True))
    again.model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()
    assert "forward" in again.model.model.layers[0].__dict__
    assert "forward" not in plain.model.model.layers[0].__dict__
