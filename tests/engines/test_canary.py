"""Engines that have other weights than the trainer, though they say the right version, get no calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gyre_hpc import canary
from gyre_hpc.canary import Canary
from gyre_hpc.config import check
from gyre_hpc.controller.keeper import Keeper
from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineServer, EngineSpec
from gyre_hpc.engines.torch_engine import TorchEngine
from gyre_hpc.errors import GyreError
from gyre_hpc.training.actor import Satellite
from tests.engines.models import VOCABULARY, plain_logprobs

VERSION = 3
TOLERANCE = canary.TOLERANCES["float32"]


def trained(model: Path) -> Canary:
    """The canary of a trainer that holds these weights."""
    return Satellite(model, check({"model": {"window": 256}}, "test")).canary(VERSION)


def keeper_of(engine: EngineServer, expected: Canary) -> Keeper:
    """Of one engine that runs already."""
    bank = EngineBank.start({0: EngineSpec("torch", Path(), 0, 8, 256, Path())}, 1.0, lambda *_: engine)
    return Keeper(bank, 1, 0, 60.0, lambda *_: expected, TOLERANCE)


def changed(model: Path, other: Path, names: str, target: Path) -> Path:
    """A copy of a model in which the tensors with `names` are another's: a shard that was left old, a tensor that was mapped wrongly."""
    shutil.copytree(model, target)
    mine, theirs = load_file(target / "model.safetensors"), load_file(other / "model.safetensors")
    found = {name: theirs[name] for name in mine if names in name}
    assert found
    save_file({**mine, **found}, target / "model.safetensors", {"format": "pt"})
    return target


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
