"""The whole job on a virtual cluster of four nodes: sbatch requeued twice, submitit, and a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.job.jobs import ROOT, Job, gyre, gyre_json, make, until
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.job, pytest.mark.slurm, pytest.mark.timeout(900)]
STEPS = 6


def requeue_twice(job: Job, slurm: Cluster, number: str) -> None:
    for attempt in (1, 2):
        until(
            f"two steps in attempt {attempt}",
            lambda n=attempt: len(job.events("run.start")) == n and len(job.steps()) >= 2 * n,  # type: ignore[misc]
            300,
        )
        slurm.run("scontrol", "requeue", number)
    until("end of the run", lambda: any(event["status"] == "done" for event in job.events("run.end")), 300)


def assert_resumed(job: Job) -> None:
    assert job.steps() == list(range(1, STEPS + 1)), "no step skipped, none repeated"
    assert len(job.events("resume")) == 2
    assert sorted(folder.name for folder in job.paths.logs.iterdir()) == ["attempt-001", "attempt-002", "attempt-003"]
    ended = [(event["group"], event["index"]) for event in job.events("execution.end")]
    assert len(ended) == len(set(ended)), "a finished execution is finished once"
    trained = [group for event in job.events("step.end") for group in event["groups"]]
    assert len(trained) == len(set(trained))
    assert {(group, index) for group in trained for index in range(4)} <= set(ended)
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []


def test_sbatch_requeued_twice(slurm: Cluster, tmp_path: Path) -> None:
    job = make(tmp_path, run={"steps": STEPS})
    said = slurm.run("sbatch", f"--output={tmp_path}/out.log", "sbatch/gyre.sbatch", str(job.config), cwd=ROOT)
    number = re.findall(r"\d+", said)[-1]
    requeue_twice(job, slurm, number)
    assert_resumed(job)


def test_submitit_requeued_twice(inside: Cluster, tmp_path: Path) -> None:
    job = make(tmp_path, run={"steps": STEPS})
    number = gyre_json("submit", str(job.config))["job"]
    requeue_twice(job, inside, str(number))
    assert_resumed(job)


def test_sweep_of_two_by_two_points(inside: Cluster, tmp_path: Path) -> None:
    grid = {"training.lr": [0.0005, 0.001], "schedule.phi": [0.25, 0.5]}
    job = make(tmp_path, run={"steps": 2}, sweep={"grid": grid, "parallelism": 1})
    table = gyre("sweep", str(job.config), timeout=800).stdout
    assert table.count("done") == 4, table
    for value in ("0.0005", "0.001", "0.25", "0.5"):
        assert value in table
