"""The promise of the quickstart, without its machinery: the built policy starts low and well-formed, and learns."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gyre_hpc.config import load
from gyre_hpc.policy.recipe import ensure

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learn_offline", ROOT / "benchmarks" / "learn_offline.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.job
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_with_stale_weights(bench: ModuleType, seed: int) -> None:
    config = load(ROOT / "configs" / "quickstart.yaml")
    scores = bench.learn(config, ensure(), seed, stale=2)
    first, last = sum(scores[:3]) / 3, sum(scores[-5:]) / 5
    assert first <= 0.3
    assert last >= 0.5
    assert last - first >= 0.3
