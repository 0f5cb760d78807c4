"""The whole job on four nodes of a virtual cluster: sbatch requeued twice, submitit, and a sweep.

Two jobs at a time have the eight nodes: half of what each of them takes is waiting for Slurm.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.job.jobs import ROOT, Job, gyre, gyre_json, make, until
from tests.slurm.cluster import Cluster, Spec, cluster, missing

pytestmark = [pytest.mark.job, pytest.mark.slurm, pytest.mark.timeout(900)]
STEPS = 6


@pytest.fixture(scope="module")
def eight() -> Iterator[Cluster]:
    """Eight nodes, and this process's environment pointing at them."""
    if lacking := missing():
        pytest.skip(f"{', '.join(lacking)} not found")
    with (
        tempfile.TemporaryDirectory(prefix="gyre-eight-") as folder,
        cluster(Path(folder), Spec(nodes=8)) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        for key, value in made.environment.items():
            patch.setenv(key, value)
        yield made


@pytest.fixture(scope="module")
def requeued(eight: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """The same job by sbatch and by submitit, beside one another; each when it is over."""
    jobs = {how: make(tmp_path_factory.mktemp(how), run={"steps": STEPS}) for how in ("sbatch", "submitit")}
    out = jobs["sbatch"].config.with_name("out.log")
    said = eight.run("sbatch", f"--output={out}", "sbatch/gyre.sbatch", str(jobs["sbatch"].config), cwd=ROOT)
    numbers = {"sbatch": re.findall(r"\d+", said)[-1], "submitit": str(gyre_json("submit", str(jobs["submitit"].config))["job"])}
    with ThreadPoolExecutor(len(jobs)) as pool:
        yield {how: pool.submit(requeue_twice, job, eight, numbers[how]) for how, job in jobs.items()}


def requeue_twice(job: Job, slurm: Cluster, number: str) -> Job:
    for attempt in (1, 2):
        until(
            f"two steps in attempt {attempt}",
            lambda n=attempt: len(job.events("run.start")) == n and len(job.steps()) >= 2 * n,  # type: ignore[misc]
            300,
        )
        slurm.run("scontrol", "requeue", number)
    until("end of the run", lambda: any(event["status"] == "done" for event in job.events("run.end")), 300)
    return job


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


@pytest.mark.parametrize("how", ["sbatch", "submitit"])
def test_requeued_twice(requeued: dict[str, Future[Job]], how: str) -> None:
    assert_resumed(requeued[how].result())


def test_sweep_of_two_by_two_points(eight: Cluster, tmp_path: Path) -> None:
    grid = {"training.lr": [0.0005, 0.001], "schedule.phi": [0.25, 0.5]}
    job = make(tmp_path, run={"steps": 2}, cells={"count": 2}, sweep={"grid": grid, "parallelism": 2})
    table = gyre("sweep", str(job.config), timeout=800).stdout
    assert table.count("done") == 4, table
    for value in ("0.0005", "0.001", "0.25", "0.5"):
        assert value in table
