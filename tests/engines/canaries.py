"""A trainer's canary for engines that run already, and models that are partly another's."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from gyre_hpc import canary
from gyre_hpc.canary import Canary
from gyre_hpc.configfile import check
from gyre_hpc.controller.keeper import Keeper
from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineServer, EngineSpec
from gyre_hpc.training.actor import Satellite

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
