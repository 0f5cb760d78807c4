"""The optimizer of a sharded core: AdamW on this rank's shards, which are the master weights. The methods of `engine.Zero`.

Invariants: every rank steps its own shards by its own part of the gradient, so a step needs one number of the others, the norm; moments are
two flat float32 vectors in the order of the shards, and the weights' memory is the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.training import world
from gyre_hpc.training.sharded import Sharded

_TINY = 1e-6
"""Beside the norm by which a gradient is divided; DeepSpeed's own."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdam:
    """Steps the shards of `held` in place. `step` is collective over the core cell."""

    def __init__(self, held: Sharded, config: Config) -> None:
        self._held, self._training = held, config.training
        self._moments = {name: torch.zeros(held.size, device=held.device) for name in _MOMENTS}
        self._steps = 0

    def step(self, gradient: Sequence[torch.Tensor], lr: float) -> float:
        """AdamW with this rank's parts of the gradient (changed by it), clipped over all ranks. Returns the norm before clipping."""
        square = sum(float(part.double().square().sum()) for part in gradient)
        norm = math.sqrt(self._held.over_ranks(square))
        clip = self._training.clip_grad
        if clip and norm + _TINY > clip:
            for part in gradient:
                part.mul_(clip / (norm + _TINY))
        self._held.rest()
        weights = [torch.nn.Parameter(part) for part in self._held.parts()]
        optimizer = torch.optim.AdamW(
            weights, lr=lr, betas=self._training.betas, weight_decay=self._training.weight_decay, fused=self._held.device.type == "cuda"
        )
        moments = {name: self._held.views(flat) for name, flat in self._moments.items()}
        for i, (weight, part) in enumerate(zip(weights, gradient, strict=True)):
            weight.grad = part
            steps = torch.tensor(float(self._steps), device=self._held.device if self._held.device.type == "cuda" else None)
            optimizer.state[weight] = {"step": steps, **{name: moments[name][i] for name in _MOMENTS}}
        optimizer.step()
        self._steps += 1
        return norm

    def arrays(self) -> dict[str, NDArray[Any]]:
        """This rank's shard, as `engine.Zero.arrays` has it; moments are views of live memory on a CPU."""
        out: dict[str, NDArray[Any]] = {"master/0": torch.cat([part.reshape(-1).cpu() for part in self._held.parts()]).numpy()}
        for name, flat in self._moments.items():
            out[f"optimizer/0/{name}"] = flat.cpu().numpy()
        out["optimizer/0/step"] = np.array([self._steps], np.float32)
        return out

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undo `arrays`. Raises ConfigError for shards of other lengths."""
        self._held.rest()
        for name in ("master/0", *(f"optimizer/0/{moment}" for moment in _MOMENTS)):
            length = len(arrays[name]) if name in arrays else 0
            if length != self._held.size:
                raise ConfigError(
                    f"the checkpoint's shard {name} has {length} numbers, this core rank's has {self._held.size}",
                    "resume with the checkpoint's cells.* and training.deepspeed",
                )
        for part, saved in zip(self._held.parts(), self._held.views(torch.from_numpy(arrays["master/0"])), strict=True):
            part.copy_(saved)
        for moment, flat in self._moments.items():
            flat.copy_(torch.from_numpy(arrays[f"optimizer/0/{moment}"]))
        self._steps = int(arrays["optimizer/0/step"][0])

    def table(self) -> list[tuple[str, int, int, int]]:
        """Names and places of the parameters in the concatenation of all ranks' `master/0`."""
        return self._held.table()

    def offload(self) -> None:
        """Weights and moments to the host."""
        self._held.to(torch.device("cpu"))
        self._moments = {name: flat.cpu() for name, flat in self._moments.items()}

    def onload(self) -> None:
        """Undo `offload`."""
        self._held.to(self._held.device)
        self._moments = {name: flat.to(self._held.device) for name, flat in self._moments.items()}

    def close(self) -> None:
        """Leave the cell's world."""
        world.leave()
