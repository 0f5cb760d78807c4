"""A pass through a model that is ended from outside, on its way there or back, and nothing else of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gyre_hpc.training.interrupt import Interrupt, Interrupted


class Layer(nn.Module):
    """Sets the interrupt in its own forward or backward pass, where it is told to."""

    def __init__(self, passed: list[str], at: str = "", interrupt: Interrupt | None = None) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4)])
        self._passed, self._at, self._interrupt = passed, at, interrupt

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        self._note("forward")
        y = self.inner[0](x)
        y.register_hook(lambda gradient: self._note("backward"))
        return y, "not a tensor"

    def _note(self, way: str) -> None:
        self._passed.append(way)
        if way == self._at and self._interrupt is not None:
            self._interrupt.set()


class Model(nn.Module):
    def __init__(self, layers: list[Layer], again: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4))
        self.blocks = nn.Module()
        self.blocks.layers = nn.ModuleList(layers)
        self._again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for layer in self.blocks.layers:
            x = checkpoint(layer, x, use_reentrant=False)[0] if self._again else layer(x)[0]
        return x.sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(torch.ones(2, 4)), list(model.parameters())))


@pytest.mark.parametrize("again", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_pass_ends_at_the_layer_after_the_one_in_which_it_was_asked_for(at: str, again: bool) -> None:
    interrupt, passed = Interrupt(), list[str]()
    layers = [Layer(passed), Layer(passed, at, interrupt), Layer(passed), Layer(passed)]
    model = Model(layers, again)
    with pytest.raises(Interrupted), interrupt.armed(model):
        gradients(model)
    assert (passed.count("forward"), passed.count("backward")) == ((2, 0) if at == "forward" else (4 + 2 * again, 3))
    with pytest.raises(Interrupted), interrupt.armed(model):
        pytest.fail("nothing begins any more")


def test_without_it_a_pass_is_as_it_was_and_nothing_of_it_stays() -> None:
    torch.manual_seed(0)
    model = Model([Layer([]), Layer([])])
    plain = gradients(model)
    with Interrupt().armed(model):
        armed = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(plain, armed, strict=True))
    assert not any(module._forward_hooks for module in model.modules())
