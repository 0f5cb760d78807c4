"""What engines take as `rollout.options`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_hpc.engines import options
from gyre_hpc.engines.options import TORCH, torch_options, vllm_options
from gyre_hpc.errors import ConfigError


def test_a_torch_engine_fills_in_defaults() -> None:
    assert torch_options({"rows": 5}) == {**TORCH, "rows": 5}
    assert torch_options({"device": "cuda:1"})["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flushh": 1}, r"rollout\.options\.flushh is unknown to the torch engine; valid: flush, "),
        ({"rows": "x"}, r"rollout\.options\.rows = 'x'; a whole number from 0"),
        ({"rows": -1}, r"rollout\.options\.rows = -1; a whole number from 0"),
        ({"flush": 0}, r"rollout\.options\.flush = 0; a whole number from 1"),
        ({"prefill": True}, r"rollout\.options\.prefill = True"),
        ({"device": 0}, r"rollout\.options\.device = 0; one of cpu, cuda"),
        ({"device": "tpu"}, r"rollout\.options\.device = 'tpu'; one of cpu, cuda, .*; empty: a GPU if there is one"),
        ({"device": "cuda:x"}, r"rollout\.options\.device = 'cuda:x'"),
    ],
)
def test_what_a_torch_engine_does_not_take_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        torch_options(options)


def test_a_vllm_engine_takes_all_but_what_it_sets_itself() -> None:
    assert vllm_options({"kv_gib": 2, "tensor_parallel_size": 4}) == {"tensor-parallel-size": 4}
    with pytest.raises(ConfigError, match=r"rollout\.options\.max-model-len is set by the engine itself; remove it"):
        vllm_options({"max_model_len": 5})


@pytest.mark.parametrize(("name", "full"), [("max_model", "max-model-len"), ("tensor-parallel", "tensor-parallel-size"), ("hos", "host")])
def test_a_name_cut_short_overrules_nothing(name: str, full: str) -> None:
    """vLLM's command line would take it."""
    with pytest.raises(ConfigError, match=rf"rollout\.options\.{name.replace('_', '-')} is short for {full}; write the names of options"):
        vllm_options({name: 4})


@pytest.mark.parametrize("size", [0.25, 0, True, "1"])
def test_a_kv_cache_that_vllm_cannot_read_is_refused_before_anything_starts(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.options\.kv_gib = .*; a whole number of GiB from 1"):
        vllm_options({"kv_gib": size})


def test_what_would_hide_wrong_weights_from_the_canary_is_refused() -> None:
    assert vllm_options({"kv_sharing_fast_prefill": False}) == {"kv-sharing-fast-prefill": False}
    with pytest.raises(ConfigError, match=r"rollout\.options\.kv-sharing-fast-prefill leaves no log-probs of prompts"):
        vllm_options({"kv_sharing_fast_prefill": True})


@pytest.mark.parametrize(("cpu", "has", "transfers"), [(False, True, True), (True, True, False), (False, False, False)])
def test_a_vllm_on_gpus_is_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, has: bool, transfers: bool
) -> None:
    if has:
        (tmp_path / "distributed/weight_transfer").mkdir(parents=True)
        (tmp_path / "distributed/weight_transfer/nccl_engine.py").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(options, "on_cpu", lambda: cpu)
    assert options.vllm_transfers() == transfers


def test_without_vllm_nothing_is_transferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert not options.vllm_transfers()
