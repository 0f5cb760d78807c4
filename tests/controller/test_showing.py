"""What the controller shows of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cells.events import Schedule
from cells.policies import make_policy
from gyre_hpc.config import Config
from gyre_hpc.controller.live import read_live
from gyre_hpc.controller.showing import Showing


def test_state_scores_and_counts_are_shown(tmp_path: Path) -> None:
    policy, path = make_policy(Schedule(capacity=(4, 4), groups_per_step=2, group_size=2, phi=0.0, mu=1, steps=2)), tmp_path / "live.json"
    with ThreadPoolExecutor(1) as pool:
        showing = Showing(Config(), 3, path, lambda: {"live": 7, "held": 1, "tokens": 5}, pool)
        showing.show(policy, 2, "step 1")
        first = read_live(path)
        assert first is not None
        assert (first["attempt"], first["standalone"], first["activity"], first["score_recent"]) == (3, 2, "step 1", None)
        pool.submit(int).result(10)  # the counts have come
        showing.scored(0.25)
        showing.scored(0.75)
        showing.last(policy, 2, "")
    found = read_live(path)
    assert found is not None
    assert (found["score_recent"], found["executions"]["live"], found["calls"]["held"]) == (0.5, 7, 1)
    assert found["roles"] == ["rollout", "rollout"]


def test_a_file_that_can_not_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = make_policy(Schedule(capacity=(4, 4), groups_per_step=2, group_size=2, phi=0.0, mu=1, steps=2))
    with ThreadPoolExecutor(1) as pool:
        Showing(Config(), 1, tmp_path / "gone" / "live.json", dict, pool).last(policy, 0, "")
    assert "live.json: " in caplog.text
