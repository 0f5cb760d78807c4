"""The tiny model's renderer, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def renderer(model: Path) -> TurnRenderer:
    return TurnRenderer(model)
