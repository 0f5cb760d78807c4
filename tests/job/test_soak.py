"""Roles change dozens of times under live agents of two kinds, and nothing fails, leaks or is lost. `python -m benchmarks.soak` has 500."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import Soak
from benchmarks.soak_growth import Allowed

pytestmark = [pytest.mark.job, pytest.mark.harness, pytest.mark.timeout(900)]


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path: vLLM makes Unix sockets in the run's own TMPDIR, whose paths may have 107 characters."""
    return tmp_path_factory.mktemp("soak")


def test_sixty_transfers_under_live_agents(place: Path) -> None:
    found = Soak(place, transfers=60, clients=2).run(Allowed(), seconds=600)
    assert found.problems == [], found.numbers
    assert found.numbers["live_least"] >= 32
    assert found.numbers["client_executions"] > 0


@pytest.mark.vllm
def test_twenty_transfers_on_vllm_leave_no_block_of_kv(place: Path) -> None:
    """All blocks are free whenever no call is in an engine, and nixl knows no lease: benchmarks/soak_kv.py. The bundled harness alone."""
    found = Soak(place, transfers=20, clients=0, engine="vllm").run(Allowed(), seconds=600)
    assert found.problems == [], found.numbers
    assert found.numbers["live_least"] >= 32
    assert found.numbers["handed_over_tokens"] > 0
