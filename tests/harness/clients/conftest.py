"""The policy's tokenizer for the clients' tests: bytes, so that any text is understood and nothing has to be trained."""

from __future__ import annotations

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import tiny_model


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TurnRenderer:
    return TurnRenderer(tiny_model(tmp_path_factory.mktemp("tiny")))
