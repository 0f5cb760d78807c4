"""When a SIGTERM that ranks got is taken for a wish to stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_hpc import stopfile
from gyre_hpc.driver import attempt
from gyre_hpc.driver.attempt import WISH, Attempt


def test_a_wish_counts_once_no_rank_has_died_meanwhile_and_anew_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, died = 1000.0, False
    monkeypatch.setattr(attempt, "time", SimpleNamespace(monotonic=lambda: now))
    # what is asked here needs no world
    made: Any = Attempt.__new__(Attempt)
    made.folder, made._wished_at, made.children = tmp_path, None, SimpleNamespace(died=lambda: died)
    assert not made._wished()
    stopfile.wish(tmp_path, "rank-00001")
    assert not made._wished()
    now += 2 * WISH
    died = True
    assert not made._wished(), "its launcher may have sent it"
    died = False
    assert made._wished()
    stopfile.withdraw(tmp_path)
    assert not made._wished()
    now += 2 * WISH
    stopfile.wish(tmp_path, "rank-00001")
    assert not made._wished(), "another one, of other ranks: its time begins now"
