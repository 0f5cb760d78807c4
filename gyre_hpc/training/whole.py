"""The whole model on one rank, and the sum of its gradients beside it (sharded.py has the other way to hold one).

Invariants: all flat vectors are float32 in the order of `model.parameters()` (tied weights once), so that cells agree without names.
Gradients are taken by `torch.autograd.grad`, beside the parameters' `.grad`: DeepSpeed's reduction hooks see only the one finished gradient
of `Core.step`. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_hpc.training.rows import Batch


class Whole:
    """`model` on `device`. `size`: numbers in a flat vector of this rank; `total`: parameters of the model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model.to(device), device
        self.parameters: list[torch.nn.Parameter] = list(model.parameters())
        self.size = self.total = sum(p.numel() for p in self.parameters)
        self._sum: torch.Tensor | None = None

    def parts(self) -> list[torch.Tensor]:
        """What this rank holds of each parameter: the live memory, without gradient."""
        return [p.detach() for p in self.parameters]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's place in a flat vector."""
        return split(flat, self.parts())

    def passes(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The batches that this rank computes for its own: those."""
        return batches

    def over_ranks(self, value: float) -> float:
        """A number that every rank has of the whole: what it is."""
        return value

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss's gradient to the sum."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if self._sum is None:
            self._sum = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        for gradient, part in zip(gradients, self.views(self._sum), strict=True):
            if gradient is not None:
                part.add_(gradient)

    def gradient(self) -> NDArray[np.float32]:
        """The sum since `zero`, float32[size], a copy; zeros if there was none."""
        return np.zeros(self.size, np.float32) if self._sum is None else self._sum.cpu().numpy().copy()

    def zero(self) -> None:
        """Forget the sum."""
        if self._sum is not None:
            self._sum.zero_()

    def rest(self) -> None:
        """Nothing is gathered for a computation any more: nothing ever is."""

    def forget(self) -> None:
        """Give the sum's memory back."""
        self._sum = None

    def to(self, device: torch.device) -> None:
        """The weights to there."""
        self.model.to(device)


def split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat vector, shaped as `like`."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
