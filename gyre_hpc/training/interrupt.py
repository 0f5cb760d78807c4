"""A micro-step that another thread ends: between two layers of the model, forward or backward.

Why: a micro-step of long rows takes minutes, a stop has seconds, and its save is asked of the rank that computes. Invariants: nothing is
interrupted that others wait for inside a collective (who shards a model over ranks arms nothing); what was interrupted has left a part of
its gradients behind, so nobody may step with them: the attempt stops after it. A layer is a module in a `ModuleList`, as every Hugging
Face model keeps its blocks; one that has none is interrupted as a whole, before it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Interrupted(Exception):
    """The pass was ended from outside."""


class Interrupt:
    """`set` from any thread; from then on a pass in `armed` raises Interrupted at its next layer, and so does every later one."""

    def __init__(self) -> None:
        self._wanted = threading.Event()

    def set(self) -> None:
        self._wanted.set()

    def is_set(self) -> bool:
        return self._wanted.is_set()

    @contextmanager
    def armed(self, model: nn.Module) -> Iterator[None]:
        """Around a pass through `model`, and back."""
        handles = [layer.register_forward_hook(self._forward) for layer in _layers(model)]
        try:
            self._look()
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._look()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(self._backward)

    def _backward(self, _gradient: torch.Tensor) -> None:
        self._look()

    def _look(self) -> None:
        if self._wanted.is_set():
            raise Interrupted


def _layers(model: nn.Module) -> list[nn.Module]:
    """The outermost that stand in a list."""
    found: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        for child in waiting.pop().children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                waiting.append(child)
    return found
