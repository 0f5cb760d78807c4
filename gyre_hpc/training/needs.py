"""What a training rank holds on its device for a model of some size, and whether that fits: the table of docs/supercomputer.md.

Pure arithmetic, of what stays and of what a step adds; activations and what is gathered for a moment come to it. So what does not fit by
this never does, and is refused before the first rollout instead of after it.
"""

from __future__ import annotations

from gyre_hpc.errors import ConfigError
from gyre_hpc.training.settings import SHARDED

_FLOAT = 4
_MOMENTS = 8
_MOST = 1 << 20
"""Ranks a cell beyond which none is proposed."""


def device_bytes(parameters: int, ranks: int, stage: int, itemsize: int, is_core: bool) -> int:
    """Bytes on the device of one of `ranks` ranks of a cell; `stage` of ZeRO; `itemsize`: bytes of a number of `model.dtype`."""
    if stage == SHARDED:
        each = 2 * _FLOAT + is_core * (_MOMENTS + _FLOAT)  # weights and sum; moments and the mean of a step
        return parameters * each // ranks
    satellite = itemsize + _FLOAT + itemsize  # weights, sum, gradients of a pass
    optimizer = (_FLOAT + _MOMENTS) / ranks
    step = _FLOAT - itemsize + (itemsize if stage == 1 else itemsize / ranks)  # the mean and its gradients, when those of a pass are gone
    return int(parameters * (satellite + is_core * (optimizer + step)))


def require(parameters: int, ranks: int, stage: int, itemsize: int, is_core: bool, device: int) -> None:
    """Raises ConfigError where a device of `device` bytes can't hold it."""
    need = device_bytes(parameters, ranks, stage, itemsize, is_core)
    if need <= device:
        return
    who = "core" if is_core else "satellite"
    fewest = next((n for n in range(1, _MOST) if device_bytes(parameters, n, SHARDED, itemsize, True) <= device / 2), _MOST)
    raise ConfigError(
        f"a rank of the {who} needs {need / 1e9:.0f} GB for weights, sums and optimizer of {parameters / 1e9:.1f} billion parameters "
        f"(ZeRO stage {stage}, {ranks} ranks a cell), its device has {device / 1e9:.0f} GB",
        f"training.deepspeed.zero_optimization.stage = {SHARDED} with {fewest} ranks a cell or more (cells.nodes_per_cell, "
        "cells.ranks_per_node) leaves half of a device to activations",
    )
