"""Cells of two ranks with an engine each, and a standalone node: real engines, routes, publication, transfers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.runtime import Runtime
from tests.job.jobs import Job, gyre, gyre_json, make

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]


def routes(job: Job) -> dict[str, Any] | None:
    """What the gateway tells of its routes, while it lives."""
    try:
        runtime = Runtime.read(job.paths.runtime(1) / "runtime.json")
        return dict(ControlClient(runtime.gateway_url, runtime.secret, deadline=5.0).status()["cells"])
    except (GyreError, KeyError):
        return None


def test_two_engines_a_cell_and_a_standalone_node(tmp_path: Path) -> None:
    job = make(
        tmp_path,
        run={"steps": 2},
        cells={"count": 2, "ranks_per_node": 2, "standalone": 1},
        rollout={"engines_per_cell": 2, "capacity": 2},
        schedule={"phi": 0.0},
        harness={"tool_delay": 0.3},
    )
    log = tmp_path / "log"
    process = job.start(log)
    job.wait_for_steps(process, 1, log)
    seen = routes(job)
    assert process.wait(300) == 0, log.read_text()
    if seen is not None:  # the run may have been over before we asked
        assert {cell: (route["engines"], route["capacity"]) for cell, route in seen.items()} == {"0": (2, 4), "1": (2, 4), "2": (2, 4)}
    (engines,) = job.events("engines")
    assert (engines["capacity"], engines["standalone"], engines["measured"], engines["over"]) == ([4, 4], [4], False, 0)
    assert [(e["cell"], e["engine"]) for e in engines["engines"]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {event["cell"] for event in job.events("transfer")} == {0, 1}, "a standalone cell never changes its role"
    for cell in range(3):
        for engine in range(2):
            text = (job.paths.attempt_logs(1) / f"engine-{cell}.{engine}.log").read_text()
            assert "version-000001" in text, f"engine {engine} of cell {cell} never loaded the published weights"
    assert "cell 2 only serves" in (job.paths.attempt_logs(1) / "mpi.log").read_text()
    assert job.steps() == [1, 2]
    assert job.events("execution.lost") == []
    assert "standalone nodes:" in gyre("status", str(job.paths.root)).stdout
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
    assert not job.processes()
