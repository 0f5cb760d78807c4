"""The two shipped configurations of the main job, as they are: it learns on torch, and runs on vLLM (there with few and small steps)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.configfile import load
from gyre_hpc.paths import RunPaths
from tests.job.jobs import ROOT, Job, gyre_json

pytestmark = [pytest.mark.job, pytest.mark.timeout(1500)]


def shipped(name: str, folder: Path) -> Job:
    return Job(ROOT / "configs" / name, RunPaths(folder / "run"))


def run(job: Job, *overrides: str) -> None:
    log = job.paths.root.parent / "out.log"
    assert job.start(log, f"run.dir={job.paths.root}", *overrides).wait(1400) == 0, log.read_text()
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
    assert job.events("execution.lost") == []
    assert not job.processes()


def test_the_quickstart_learns_while_cells_swap_under_live_agents(tmp_path: Path) -> None:
    job = shipped("quickstart.yaml", tmp_path)
    run(job)
    scores = [event["score_mean"] for event in job.events("step.end")]
    first, last = sum(scores[:3]) / 3, sum(scores[-5:]) / 5
    assert len(scores) >= 20
    assert first <= 0.3, "the warm-up leaves something to learn"
    assert last >= 0.5
    assert last - first >= 0.3
    assert sum(event["live"] > 0 for event in job.events("transfer")) >= 10
    assert sum(event["moved"] for event in job.events("transfer")) > 0, "calls in flight went on elsewhere"
    assert {event["reason"] for event in job.events("execution.end")} <= {"finished", "limit"}


@pytest.mark.vllm
def test_the_same_job_runs_on_vllm(tmp_path: Path) -> None:
    job = shipped("quickstart-vllm.yaml", tmp_path)
    assert load(job.config).rollout.engine == "vllm"
    run(job, "run.steps=2", "schedule.groups_per_step=3", "schedule.group_size=4", "rollout.capacity=8")
    assert job.steps() == [1, 2]
    assert job.events("step.end")[0]["logprob_difference"] < 1e-4
