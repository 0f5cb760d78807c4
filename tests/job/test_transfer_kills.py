"""kill -9 at the very begin of phases of real transfers: the run goes on, or stops with 75 and the same command resumes it to its end.

Nothing is skipped, repeated or lost. All phases with all processes: `python -m tests.job.killing all FOLDER`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.events import read_events
from tests.job.killing import go_through

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]


def test_any_process_may_be_killed_in_any_phase(tmp_path: Path) -> None:
    kills = [
        {"phase": "unroute", "who": "harness"},
        {"phase": "reserve", "who": "supervisor"},
        {"phase": "hold", "who": "engine"},
        {"phase": "hand-over", "who": "gateway"},
        {"phase": "release", "who": "controller"},
        {"phase": "update", "who": "engine"},
        {"phase": "restore", "who": "leader"},
        {"phase": "wake", "who": "harness"},
    ]
    lines = go_through(tmp_path, kills)
    assert len(lines) == 4, "only the gateway, the controller and a leader end an attempt"
    kinds = [event["kind"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert "engine.died" in kinds, "the one that was not found dead by what it was told"
