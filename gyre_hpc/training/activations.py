"""What a forward keeps for its backward: all of it, or of some decoder layers the input alone, from which they are computed again.

A layer keeps some 25 to 80 times its input. With `auto` the first layers of each forward keep everything while the next one fits into a
share of the memory that is free at that moment; the others are computed again, which costs about a third more time for each of them. So
short rows of a small model cost nothing, and a row of 100,000 tokens holds the inputs of its layers and one layer more.

Invariants
- The numbers are the same bits with and without, where the layer's own code gives the same bits twice: the region is one layer and its
  input is kept, so what it is computed again from, a router's choice of experts included, is not itself computed again.
- Modules are where they were: a layer's `forward` is put behind ours as an attribute of the instance. No name of a parameter changes, no
  hook is added to a layer; hooks of others (FSDP2's that gather its weights) stand outside, and are not run again.
- Evaluation mode, no dropout, nothing random: no state of a generator is kept. (Hugging Face's own switch acts in training mode only.)
- Which layers are computed again may differ between ranks that share a model (FSDP2): a layer's weights are there for its backward in any
  case. A layer with a module inside that is gathered by itself, a router in float32, is always computed again, and to its end: its
  collectives are as many on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from gyre_hpc import memory

log = logging.getLogger(__name__)

Mode = Literal["auto", "offload"] | bool
"""False: keep all; True: inputs of layers only; offload: those wait in the host's memory; auto: as much as fits."""

DEVICE_SHARE, HOST_SHARE = 1 / 4, 1 / 16
"""Of free memory, for what layers keep. The rest is for the layer in hand, gradients, the head, and on a host for others."""
USUAL = 40.0
"""Times its input that a layer keeps, before one has shown it."""


def recompute_layers(model: Any, mode: Mode, budget: Callable[[torch.device], float] | None = None) -> int:
    """Let the decoder layers of a Hugging Face model be computed again in the backward, as `mode` says. Returns how many can be.

    `budget`: bytes that layers of one forward may keep together, all their inputs included (None: a share of what is free). Once, before
    a forward.
    """
    if mode is False:
        return 0
    layers = decoder_layers(model)
    if not layers:
        log.warning("%s: no decoder layers found: activations of all of it are kept", type(model).__name__)
        return 0
    if mode == "auto":
        kept = _Kept(budget or share_of_free, len(layers))
        model.register_forward_pre_hook(lambda _model, _args: kept.begin())
    else:
        kept = _Kept(lambda _device: 0.0, len(layers))
    for layer in layers:
        layer.forward = _Layer(layer, kept, on_host=mode == "offload")
    return len(layers)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The modules that Hugging Face marks as layers to be checkpointed, none inside another; else those that it never splits."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    whole = set(getattr(model, "_no_split_modules", None) or ())
    marked = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    found = marked or [m for m in model.modules() if type(m).__name__ in whole]
    inner = {id(part) for layer in found for part in layer.modules() if part is not layer}
    return [layer for layer in found if id(layer) not in inner]


def share_of_free(device: torch.device) -> float:
    """Bytes that activations of one forward may take on `device`, by what is free there now."""
    if device.type != "cuda":
        return memory.available() * HOST_SHARE
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + cached) * DEVICE_SHARE


@dataclass
class _Kept:
    """What the layers of the forward under way have kept: `left` bytes of its budget once that was `asked`, `seen` storages; `times` its
    input that the last one kept."""

    budget: Callable[[torch.device], float]
    layers: int
    asked: bool = False
    left: float = 0.0
    times: float = USUAL
    seen: set[int] = field(default_factory=set)

    def begin(self) -> None:
        self.asked, self.times = False, USUAL
        self.seen.clear()

    def room(self, given: torch.Tensor) -> bool:
        """Whether a layer with this input may keep what it computes."""
        if not self.asked:
            self.asked = True
            self.left = self.budget(given.device) - self.layers * given.nbytes
        return self.left >= self.times * given.nbytes

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.left -= storage.nbytes()


class _Layer:
    """The `forward` of one layer."""

    def __init__(self, layer: torch.nn.Module, kept: _Kept, on_host: bool) -> None:
        self._layer, self._forward, self._kept, self._on_host = layer, layer.forward, kept, on_host

    @cached_property
    def _gathers_inside(self) -> bool:
        """Asked at the first forward: the model is sharded after it was loaded."""
        return any(isinstance(part, FSDPModule) for part in self._layer.modules() if part is not self._layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        given = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if self._kept.room(given) and not self._gathers_inside:
            return self._counted(given, *args, **kwargs)
        if self._on_host:
            with torch.autograd.graph.save_on_cpu(pin_memory=given.is_cuda):
                return self._again(*args, **kwargs)
        return self._again(*args, **kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        early = not self._gathers_inside  # what has begun to gather must end it
        return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=False, early_stop=early, **kwargs)

    def _counted(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As it is, with an account of what autograd keeps of it beside the layer's weights."""
        before = self._kept.left
        weights = {p.untyped_storage().data_ptr() for p in (*self._layer.parameters(), *self._layer.buffers())}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self._kept.count(storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self._forward(*args, **kwargs)
        self._kept.times = (before - self._kept.left) / max(1, given.nbytes)
        return out
