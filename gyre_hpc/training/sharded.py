"""A model in R shards, one for each rank of a cell: parameters are gathered layer by layer while they are computed with (torch's FSDP2).

Why not DeepSpeed's ZeRO-3: it divides each rank's gradient by R before it adds them up (what leaves a cell here is a plain sum), it can't
give up an accelerator's memory with torch's AdamW (its `offload_states` asserts FusedAdam, which needs a compiler), and cells that have no
optimizer would have one with its own copy of the weights. FSDP2 does less, and each of that by a switch.

Invariants
- The shards are float32, those of the core are its master weights; gathered they are of `model.dtype`, or of what the model keeps a
  parameter in. Gradients of one pass are of that dtype, are added up over ranks and passes in float32, and divided by nothing.
- A flat vector is this rank's shards in the order of `model.parameters()`: shapes and R decide it, so it is the same in every cell.
- Parameters are cut along their first dimension (the last ranks have less where R does not divide it), along another one where the first
  is short and does not divide: experts of a mixture, over more ranks than there are of them.
- A pass is collective: all ranks run the same number of them, with batches of weight zero where a rank has none left; which parameters a
  pass reached (experts) does not matter. After `rest` no gathered copy is left, and only then shards may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.training import loading, world
from gyre_hpc.training.activations import decoder_layers
from gyre_hpc.training.rows import Batch
from gyre_hpc.training.whole import split

_SHORT = 8
"""A first dimension of fewer than so many entries a rank is cut elsewhere if R does not divide it: 9 entries for 2 ranks are 5 and 4."""
_RUNS = 1024
"""A cut along another dimension makes so many pieces a rank at most: a checkpoint's table has a row for each of them."""
_TAKE_ANOTHER = "this model can't be sharded: training.deepspeed.zero_optimization.stage = 1 or 2"
IDLE = Batch(
    ids=np.zeros((1, 2), np.int64),
    row=np.zeros(1, np.int64),
    position=np.ones(1, np.int64),
    behaviour=np.zeros(1, np.float32),
    version=np.zeros(1, np.int64),
    weight=np.zeros(1, np.float32),
    advantage=np.zeros(1, np.float32),
    tokens=0,
)
"""For a rank that has no batch left while others have: its gradient is zero."""


class Sharded:
    """One rank's shards; the fields and methods of `whole.Whole`, which more of are collective.

    The constructor is collective over the cell: rank 0 reads the model, nobody else ever holds the whole. `require`: told the number of
    parameters before any memory is taken for them. Raises ConfigError.
    """

    def __init__(self, model_dir: Path, config: Config, seat: world.Seat, device: torch.device, require: Callable[[int], None]) -> None:
        self.device, self.rank, self.ranks = device, seat.rank, seat.ranks
        source = loading.load(model_dir, config) if seat.rank == 0 else None
        self.model = loading.skeleton(model_dir, config)
        told = _told(source)
        require(sum(math.prod(shape) for shape, _ in told.parameters.values()))
        self._shard(told, getattr(torch, config.model.dtype))
        self.model.to_empty(device=device)
        _fill_others(self.model, told, device)
        self._refresh()
        self._scatter(source, told)
        if source is not None:
            self.model._weight_conversions = getattr(source, "_weight_conversions", None)
        self.size = sum(part.numel() for part in self.parts())
        self.total = sum(p.numel() for p in self.parameters)

    # -- layout -------------------------------------------------------------------------------------------------------------------

    def parts(self) -> list[torch.Tensor]:
        """What this rank holds of each parameter: the live memory, without gradient."""
        return [_local(p) for p in self.parameters]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each part's place in a flat vector of this rank."""
        return split(flat, self.parts())

    def table(self) -> list[tuple[str, int, int, int]]:
        """(name, 0, offset, length) in the joined flat vectors of all ranks, in rank order: a parameter's rows, one after the other, are
        the parameter, flat."""
        sizes = [self._sizes(rank) for rank in range(self.ranks)]
        starts = np.cumsum([0, *(sum(own) for own in sizes)])
        offsets = [np.cumsum([start, *own]) for start, own in zip(starts, sizes, strict=False)]
        rows = []
        for i, (name, p) in enumerate(zip(self.names, self.parameters, strict=True)):
            runs = int(np.prod(p.shape[: _dimension(p)]))
            for run in range(runs):
                for rank in range(self.ranks):
                    length = sizes[rank][i] // runs
                    if length:
                        rows.append((name, 0, int(offsets[rank][i]) + run * length, length))
        return rows

    def _sizes(self, rank: int) -> list[int]:
        """Numbers of each parameter that are a rank's."""
        return [_share(p.shape[_dimension(p)], self.ranks, rank) * (p.numel() // max(1, p.shape[_dimension(p)])) for p in self.parameters]

    # -- computing ----------------------------------------------------------------------------------------------------------------

    @property
    def published_bytes(self) -> int:
        """Of the whole model, in the dtypes in which it is computed with."""
        return sum(p.numel() * dtype.itemsize for p, dtype in zip(self.parameters, self._dtypes, strict=True))

    def passes(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The batches that this rank computes beside the others' (collective)."""
        most = torch.tensor(len(batches))
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return [*batches, *[IDLE] * (int(most) - len(batches))]

    def over_ranks(self, value: float) -> float:
        """The sum of every rank's number (collective)."""
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss's gradient, and the other ranks', to the sum of which this rank keeps its shard (collective)."""
        loss.backward()

    def gradient(self) -> NDArray[np.float32]:
        """This rank's shard of the sum over all ranks since `zero`, float32[size], a copy; zeros if there was none."""
        flat = torch.zeros(self.size)
        for p, place in zip(self.parameters, self.views(flat), strict=True):
            if p.grad is not None:
                place.copy_(_local(p.grad))
        return flat.numpy()

    def zero(self) -> None:
        """Forget the sum."""
        for p in self.parameters:
            p.grad = None

    forget = zero

    def rest(self) -> None:
        """No gathered copy is left. The root module's would stay after a pass without gradient."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def to(self, device: torch.device) -> None:
        """The shards to there."""
        self.rest()
        self.model.to(device)
        self._refresh()

    def gathered(self, i: int) -> torch.Tensor | None:
        """Parameter i whole, in the dtype in which it is computed with, on rank 0's host; None elsewhere (collective)."""
        p, dtype = self.parameters[i], self._dtypes[i]
        local, dim = _local(p).to(dtype), _dimension(p)
        if self.ranks == 1:
            return local.cpu()
        longest = _share(p.shape[dim], self.ranks, 0)
        padded = local.new_zeros(*p.shape[:dim], longest, *p.shape[dim + 1 :])
        padded.narrow(dim, 0, local.shape[dim]).copy_(local)
        into = [torch.empty_like(padded) for _ in range(self.ranks)] if self.rank == 0 else None
        distributed.gather(padded, into)
        if into is None:
            return None
        return torch.cat(into, dim).narrow(dim, 0, p.shape[dim]).cpu()

    # -- building -----------------------------------------------------------------------------------------------------------------

    def _shard(self, told: _Told, dtype: torch.dtype) -> None:
        """Wrap the skeleton: its layers one by one, and what is left, embeddings and head, as the root."""
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        described = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        loaded = {name: shape for name, (shape, _) in told.parameters.items()}
        for name in sorted(described.keys() | loaded.keys()):
            if described.get(name) != loaded.get(name):
                raise ConfigError(f"parameter {name} is {described.get(name)} by config.json, {loaded.get(name)} as loaded", _TAKE_ANOTHER)
            if not loaded[name]:
                raise ConfigError(f"parameter {name} is a single number", _TAKE_ANOTHER)
        for p in self.model.parameters():
            p.data = p.data.float()
        self._dtypes = [told.parameters[name][1] for name, _ in self.model.named_parameters()]

        def cut(p: torch.nn.Parameter) -> Shard:
            return Shard(_best_dimension(tuple(p.shape), self.ranks))

        def wrap(module: torch.nn.Module, computed: torch.dtype) -> None:
            policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32, cast_forward_inputs=False)
            try:
                shards = fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=cut)
            except ValueError as error:  # a parameter that two layers share, for instance
                raise ConfigError(
                    f"{type(module).__name__} can't be sharded: {error}", "this model can't be sharded: take ZeRO stage 1"
                ) from error
            shards.set_force_sum_reduction_for_comms(True)
            shards.set_gradient_divide_factor(1.0)

        for module, computed in kept_apart(self.model, {name: kept for name, (_, kept) in told.parameters.items()}, dtype):
            wrap(module, computed)
        for layer in layers(self.model):
            wrap(layer, dtype)
        wrap(self.model, dtype)
        self.model.set_reduce_scatter_unused_params(True)

    def _refresh(self) -> None:
        named = list(self.model.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters: list[Any] = [p for _, p in named]

    def _scatter(self, source: Any, told: _Told) -> None:
        """Every rank gets its part of each parameter, one after the other (collective)."""
        whole = dict(source.named_parameters()) if source is not None else {}
        for name, p in zip(self.names, self.parameters, strict=True):
            local, dim = _local(p), _dimension(p)
            longest = _share(p.shape[dim], self.ranks, 0)
            into = torch.empty((*p.shape[:dim], longest, *p.shape[dim + 1 :]), dtype=told.parameters[name][1], device=self.device)
            pieces = None
            if source is not None:
                full = whole[name].detach().to(self.device)
                pieces = [_padded(piece, into) for piece in _pieces(full, self.ranks, dim)]
                whole[name].data = torch.empty(0, dtype=full.dtype)
            distributed.scatter(into, pieces)
            with torch.no_grad():
                local.copy_(into.narrow(dim, 0, local.shape[dim]))


class _Told:
    """What rank 0 tells of the model that it read: `parameters` name -> (shape, dtype); `others` (module, attribute) -> tensor, buffers
    and what modules keep beside them."""

    def __init__(self, model: Any) -> None:
        self.parameters = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        self.others = {
            (path, name): tensor
            for path, module in model.named_modules()
            for name, tensor in (*module._buffers.items(), *vars(module).items())
            if isinstance(tensor, torch.Tensor)
        }


def _told(source: Any) -> _Told:
    """Rank 0's, everywhere (collective)."""
    held: list[Any] = [_Told(source) if source is not None else None]
    distributed.broadcast_object_list(held, 0, device=torch.device("cpu"))
    told: _Told = held[0]
    return told


def _fill_others(model: Any, told: _Told, device: torch.device) -> None:
    """What is no parameter is small, and whole everywhere."""
    for path, module in model.named_modules():
        for name in [*module._buffers, *vars(module)]:
            given = told.others.get((path, name))
            if name in module._buffers:
                module._buffers[name] = given.to(device) if given is not None else None
            elif given is not None:
                setattr(module, name, given.to(device))
            elif isinstance(getattr(module, name), torch.Tensor):
                raise ConfigError(f"{path}.{name} is no parameter, and unknown as loaded", _TAKE_ANOTHER)


def layers(model: Any) -> list[torch.nn.Module]:
    """The modules that are gathered one at a time: the decoder's layers; of a model that doesn't tell them, its heaviest list."""
    found = decoder_layers(model)
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=()))


def kept_apart(model: Any, dtypes: Mapping[str, torch.dtype], usual: torch.dtype) -> list[tuple[torch.nn.Module, torch.dtype]]:
    """Modules whose own parameters the model keeps in another dtype (routers in float32, say); `dtypes` by the parameters' names.

    Raises ConfigError where such a module holds others of the usual kind.
    """
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [prefix + name for name, _ in module.named_parameters(recurse=False)]
        other = {dtypes[name] for name in own if name in dtypes} - {usual}
        if other:
            below = {dtypes[prefix + name] for name, _ in module.named_parameters() if prefix + name in dtypes}
            if below != other or len(other) > 1:
                raise ConfigError(f"{path} has parameters of several dtypes: {', '.join(sorted(map(str, below)))}", _TAKE_ANOTHER)
            found.append((module, other.pop()))
    return found


def _best_dimension(shape: tuple[int, ...], ranks: int) -> int:
    """Along which a parameter is cut."""
    if shape[0] % ranks == 0 or shape[0] >= _SHORT * ranks:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0 and math.prod(shape[:dim]) <= _RUNS), 0)


def _dimension(p: DTensor) -> int:
    placement = p.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim


def _share(entries: int, ranks: int, rank: int) -> int:
    """Entries of a dimension that are a rank's: as torch.chunk cuts."""
    each = -(-entries // ranks)
    return max(0, min(each, entries - rank * each))


def _pieces(full: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    sizes = [_share(full.shape[dim], ranks, rank) for rank in range(ranks)]
    return list(full.split(sizes, dim))


def _padded(piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if piece.shape == like.shape:
        return piece.contiguous()
    padded = torch.zeros_like(like)
    padded[tuple(slice(0, n) for n in piece.shape)] = piece
    return padded


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.detach().to_local()
    return local
