"""What is read of a server's metrics, and what counts as left over."""

from __future__ import annotations

from benchmarks.soak_kv import problems, total

TEXT = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 2.0
vllm:nixl_num_kv_expired_reqs_created{engine="0",model_name="m"} 1.8e+09
"""


def test_a_metric_is_summed_over_the_cores_of_an_engine() -> None:
    assert total(TEXT, "vllm:kv_cache_usage_perc") == 0.75
    assert total(TEXT, "vllm:nixl_num_kv_expired_reqs_total") == 2.0
    assert total(TEXT, "vllm:kv_cache_usage") is None


def test_a_block_a_lease_and_a_metric_that_is_not_told_are_problems() -> None:
    clean = {"engine": 7, "what": "reset", "left": {"leases": 0, "pulls": 0}}
    assert problems([clean]) == []
    (lease,) = problems([clean, {**clean, "left": {"leases": 1, "pulls": 0}}])
    assert lease == "KV of engine 7 at reset: {'leases': 1}"
    assert len(problems([{**clean, "what": "restore", "left": {"vllm:kv_cache_usage_perc": None}}])) == 1
    assert len(problems([{**clean, "what": "restore", "left": {"vllm:kv_cache_usage_perc": 1e-4}}])) == 1
