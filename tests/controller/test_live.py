"""What is true now, for the displays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.controller.live import Counts, LiveFile, read_live
from gyre_hpc.errors import Resumable


def test_the_file_is_whole_or_absent_and_a_full_disk_is_returned(tmp_path: Path) -> None:
    live = LiveFile(tmp_path / "live.json", period=0.0)
    assert read_live(live.path) is None
    assert live.write({"step": 3}) is None
    found = read_live(live.path)
    assert found is not None
    assert found["step"] == 3
    assert isinstance(LiveFile(tmp_path / "gone" / "live.json").write({}), FileNotFoundError)


def test_one_question_at_a_time_and_a_gateway_that_is_away_leaves_the_old_counts(caplog: pytest.LogCaptureFixture) -> None:
    go, answers = threading.Event(), iter([{"tokens": 10}, Resumable("out of reach"), {"tokens": 30}])

    def ask() -> dict[str, Any]:
        assert go.wait(10)
        answer = next(answers)
        if isinstance(answer, Resumable):
            raise answer
        return answer

    with ThreadPoolExecutor(1) as pool:
        counts = Counts(ask, pool)
        for _ in range(5):
            counts.refresh()
        go.set()
        pool.submit(int).result(10)
        assert counts.newest["tokens"] == 10, "five questions while the first waited were one"
        counts.refresh()
        pool.submit(int).result(10)
        assert counts.newest["tokens"] == 10
        assert "out of reach" in caplog.text
        counts.refresh()
        pool.submit(int).result(10)
    assert counts.newest["tokens"] == 30
    assert counts.newest["tokens_per_second"] > 0
