"""Small random models and a torch engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.engines.protocol import EngineSpec
from gyre_hpc.engines.torch_engine import TorchEngine
from tests.engines.models import save_random


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random Qwen3 of one shape and different weights."""
    root = tmp_path_factory.mktemp("models")
    return save_random(root / "a", 0), save_random(root / "b", 1)


@pytest.fixture(scope="session")
def engine(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    """One torch engine with model a as version 0; whoever changes its state puts it back."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    server = TorchEngine(EngineSpec("torch", models[0], 0, 8, 256, log, options={"flush": 4}), 60.0)
    yield server
    server.stop()
