from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.simulation.sessions import GROUP_SPREAD, active_seconds
from gyre_hpc.simulation.workload import read_recorded


def call(t: float, api: float, think: float = 0.0) -> dict[str, object]:
    return {"t": t, "type": "s", "api_time": api, "think_time": think}


def test_pauses_of_a_person_do_not_count_and_sub_agents_do() -> None:
    agent = {"t": 20.0, "type": "subagent", "duration_ms": 100_000, "requests": [call(0, 50)]}
    # 0-10, 15-30 (its pause of 5 s before), the sub-agent 20-120, and 940-1001 behind an hour of nothing
    session = {"requests": [call(0, 10), call(20, 10, 5), agent, call(1000, 1, 3600)]}
    assert active_seconds(session) == pytest.approx(10 + 5 + 100 + 61)


def test_sessions_are_groups_of_one_that_are_spread_when_drawn(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl.gz"
    with gzip.open(file, "wt") as out:
        for number, seconds in enumerate((100.0, 10_000.0)):
            out.write(json.dumps({"id": f"trace_{number}", "requests": [call(0, seconds)]}) + "\n")
    work = read_recorded(file)
    assert (work.groups, work.spread) == (((100.0,), (10_000.0,)), GROUP_SPREAD)
    drawn = np.array([work.group(0, g, 8) for g in range(2000)])
    short = drawn[drawn.mean(axis=1) < 1000]
    assert 0.4 < len(short) / 2000 < 0.6
    assert short.mean() == pytest.approx(100.0, rel=0.02)
    assert np.log(short).std(axis=1, ddof=1).mean() == pytest.approx(GROUP_SPREAD, rel=0.06)
    assert [list(work.group(0, g, 8)) for g in (7, 3, 7)] == [list(work.group(0, g, 8)) for g in (7, 3, 7)]
