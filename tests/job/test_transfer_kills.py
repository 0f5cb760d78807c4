"""kill -9 in each phase of real transfers: the run goes on, or stops with 75 and the same command resumes it to its end.

Nothing is skipped, repeated or lost. All phases and processes, at three moments: `python -m tests.job.killing all FOLDER`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.transfer import Phase
from gyre_hpc.events import read_events
from tests.job.killing import go_through

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]


def test_any_process_may_be_killed_in_any_phase(tmp_path: Path) -> None:
    kills = [
        {"phase": "unroute", "who": "harness", "when": "begin"},
        {"phase": "reserve", "who": "supervisor", "when": "middle"},
        {"phase": "hold", "who": "engine", "when": "begin"},
        {"phase": "acknowledge", "who": "peer", "when": "end"},
        {"phase": "hand-over", "who": "gateway", "when": "middle"},
        {"phase": "join", "who": "peer", "when": "begin"},
        {"phase": "release", "who": "controller", "when": "end"},
        {"phase": "leave", "who": "supervisor", "when": "middle"},
        {"phase": "update", "who": "engine", "when": "begin"},
        {"phase": "restore", "who": "leader", "when": "middle"},
        {"phase": "wake", "who": "harness", "when": "begin"},
        {"phase": "route", "who": "engine", "when": "end"},
    ]
    assert [phase for phase in Phase if phase.value not in {kill["phase"] for kill in kills}] == []
    lines = go_through(tmp_path, kills)
    assert len(lines) == 4, "only the gateway, the controller and a leader end an attempt"
    kinds = [event["kind"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert "engine.died" in kinds, "the one that was not found dead by what it was told"
