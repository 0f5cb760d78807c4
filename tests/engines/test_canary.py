"""Engines that have other weights than the trainer, though they say the right version, get no calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc import canary
from gyre_hpc.engines.torch_engine import TorchEngine
from gyre_hpc.errors import GyreError
from tests.engines.canaries import VERSION, changed, keeper_of, trained
from tests.engines.models import VOCABULARY, plain_logprobs


@pytest.fixture
def clean(engine: TorchEngine, models: tuple[Path, Path]) -> Iterator[TorchEngine]:
    """The engine; what others expect of it afterwards."""
    yield engine
    engine.update_weights(models[0], 0, 60.0)


def test_an_engine_says_what_a_plain_pass_says_also_while_it_is_paused(engine: TorchEngine, models: tuple[Path, Path]) -> None:
    tokens = list(canary.text(VOCABULARY, 256))
    expected = plain_logprobs(models[0], tokens[:1], tokens[1:])
    engine.pause(5.0)
    try:
        assert np.abs(np.subtract(engine.logprobs(tokens, 5.0), expected)).max() < 1e-4
    finally:
        engine.resume(5.0)
    assert len(engine.logprobs(tokens[:2], 5.0)) == 1


def test_the_right_weights_pass_after_a_load_and_after_a_way_back(clean: TorchEngine, models: tuple[Path, Path]) -> None:
    keeper = keeper_of(clean, trained(models[1]))
    keeper.load(models[1], VERSION, 60.0)
    keeper.release(60.0)
    keeper.load(models[1], VERSION, 60.0)
    keeper.resume(models[1], VERSION, 60.0)


@pytest.mark.parametrize("names", ["layers.1.", "layers.0.self_attn.k_proj"])
def test_weights_that_are_partly_old_are_caught(clean: TorchEngine, models: tuple[Path, Path], names: str, tmp_path: Path) -> None:
    keeper = keeper_of(clean, trained(models[1]))
    with pytest.raises(GyreError, match=r"engine 0 of cell 1 .* version 3 .* after loading .* again"):
        keeper.load(changed(models[1], models[0], names, tmp_path / "mixed"), VERSION, 60.0)


def test_one_bad_load_is_mended_by_the_next(clean: TorchEngine, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [models[0], models[1]]
    load = clean._load
    monkeypatch.setattr(clean, "_load", lambda name, _, version, deadline: load(name, paths.pop(0), version, deadline))
    keeper_of(clean, trained(models[1])).load(models[1], VERSION, 60.0)
    assert not paths
