"""A whole run on vLLM whose cells hand over KV to one another under live executions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.jobs import gyre_json, make

pytestmark = [pytest.mark.job, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_cells_leave_with_the_kv_of_live_executions(tmp_path: Path) -> None:
    job = make(
        tmp_path,
        run={"steps": 2},
        cells={"count": 2},
        rollout={"engine": "vllm", "handover": "nixl", "capacity": 8, "options": {"kv_gib": 1}},
        harness={"tool_delay": 1.5},  # executions wait for tools when a cell leaves
        schedule={"groups_per_step": 3, "group_size": 4},
        deadlines={"start": 600, "transfer": 120, "step": 300, "idle": 300},
    )
    log = tmp_path / "out.log"
    assert job.start(log).wait(800) == 0, log.read_text()
    assert job.steps() == [1, 2]
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
    assert job.events("execution.lost") == []
    assert job.events("warning.fork") == [], "what an agent sees of a hand-over is nothing"
    assert {event["reason"] for event in job.events("execution.end")} <= {"finished", "limit"}
    fresh = [event["logprob_difference"] for event in job.events("step.end") if not event["token_staleness"]]
    assert fresh, "step 1 has nothing older"
    assert max(fresh) < 1e-4, "the trainer finds the log-probs that were sampled"
    left = [event for event in job.events("transfer") if event["to"] == "training"]
    print("\n".join(str((event["seconds"], event["live"], event["phases"], event["handover"])) for event in left))
    assert any(event["live"] for event in left)
    for event in left:
        order = [phase for phase in event["phases"] if phase in ("unroute", "hold", "hand-over", "acknowledge", "release")]
        assert order == ["unroute", "hold", "hand-over", "acknowledge", "release"], "nothing is freed before the other cell has it"
        assert set(event["handover"]["phases"]) == {"pin", "pull"}
        assert set(event["handover"]["doubts"]) <= {"short", "over"}, "a pull that is given up has a reason"
    assert sum(event["handover"]["calls"] + event["handover"]["conversations"] for event in left) > 0
    assert sum(event["handover"]["bytes"] for event in left) > 0
    told = [event for event in job.events("transfer.phase") if event["phase"] == "acknowledge" and not event["undo"]]
    assert sum(event["bytes"] for event in told) == sum(event["handover"]["bytes"] for event in left)
    assert not job.processes()
