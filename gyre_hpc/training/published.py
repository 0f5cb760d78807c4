"""A model's weights under the names of its own files: what engines load, or receive from memory.

Invariants: names, values and dtypes are those that Hugging Face's `save_pretrained` gives: tied tensors once, converted ones (fused
experts) back. Of a sharded model nobody but rank 0 ever has more than its shard, and rank 0 one layer more than what it is asked to keep:
files are written one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gyre_hpc.training.sharded import Sharded

FILE_BYTES = 5 << 30
"""Of one file of weights, about: the next begins where it is passed."""


def published(model: Any, on_device: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The tensors that `save_pretrained` would write, under the names that it would give them, of a model that is here whole."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    with torch.no_grad():
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
        return [(name, (tensor if on_device else tensor.to("cpu")).contiguous()) for name, tensor in state.items()]


def stream(held: Sharded) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of a sharded model, layer by layer, on rank 0's host; nothing elsewhere. Collective: every rank goes through to the end."""
    from transformers.core_model_loading import revert_weight_conversion

    held.rest()
    places = {id(p): i for i, p in enumerate(held.parameters)}
    for names in _units(held):
        state = {}
        for name in names:
            tensor = held.model.get_parameter_or_buffer(name)
            whole = held.gathered(places[id(tensor)]) if id(tensor) in places else tensor.detach().cpu()
            if whole is not None and held.rank == 0:
                state[name] = whole
        if held.rank == 0:
            with torch.no_grad():
                converted = revert_weight_conversion(held.model, state)
            yield from ((name, tensor.contiguous()) for name, tensor in converted.items())


def _units(held: Sharded) -> list[list[str]]:
    """Names in the model's state, tied ones once: those of each layer, for conversions know no border but that, and the rest."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    from gyre_hpc.training.sharded import layers

    blank: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in held.model.state_dict(keep_vars=True).items():
        state[name] = blank.setdefault(id(tensor), torch.empty(tensor.shape, device="meta"))
    for name in held.model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    kept = list(remove_tied_weights_from_state_dict(state, held.model))
    inside = {id(layer) for layer in layers(held.model)}
    prefixes = [f"{path}." for path, module in held.model.named_modules() if id(module) in inside]
    units: dict[str, list[str]] = {prefix: [] for prefix in ("", *prefixes)}
    for name in kept:
        units[next((prefix for prefix in prefixes if name.startswith(prefix)), "")].append(name)
    return list(units.values())


def write_files(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write `weights` as safetensors into `folder`, as `from_pretrained` reads them: one file, or several and their index.

    Raises OSError, SafetensorError.
    """
    from safetensors.torch import save_file

    pending: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files):05d}.part", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and size + tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] if len(files) > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        (folder / f"{i:05d}.part").rename(folder / name)
    if len(files) > 1:
        held = {weight: name for name, weights_ in zip(names, files, strict=True) for weight in weights_}
        index = {"metadata": {"total_size": total}, "weight_map": held}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
