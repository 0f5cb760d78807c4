"""How the processes of a vLLM server wait for one another, with the installed vLLM."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, in which what a server's processes change is undone after the test."""
    from vllm.distributed.device_communicators import shm_broadcast

    # what is there to be changed: an import alone would not fail with another vLLM
    for name in ("SHM_READER_RECHECK_INTERVAL_MS", "sched_yield"):
        monkeypatch.setattr(shm_broadcast, name, getattr(shm_broadcast, name))
    return shm_broadcast


@pytest.mark.parametrize("cpu", [True, False])
def test_a_reader_takes_naps_on_a_cpu_and_looks_again_soon(mended: Any, monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    from gyre_hpc.engines import vllm_main

    spins: list[float] = []
    monkeypatch.setattr(mended, "sched_yield", lambda: spins.append(0.0))
    monkeypatch.setattr(vllm_main, "time", SimpleNamespace(sleep=spins.append))
    vllm_main.mend(cpu)
    reader = mended.SpinCondition.__new__(mended.SpinCondition)
    reader.is_reader, reader.last_read, reader.busy_loop_s = True, time.monotonic(), 60.0
    reader.wait(timeout_ms=1)
    assert spins == [vllm_main.NAP if cpu else 0.0]
    assert mended.MessageQueue.ReadTimeoutWithWarnings(None, False).timeout_ms() == vllm_main.LOOK


def test_a_vllm_that_waits_otherwise_is_told_of(mended: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from gyre_hpc.engines import vllm_main

    monkeypatch.delattr(mended, "sched_yield")
    vllm_main.mend(True)
    assert "this vLLM has no sched_yield" in caplog.text
