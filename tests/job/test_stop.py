"""SIGTERM to every process of a job in the middle of something, as a scheduler sends it: the newest step is saved, none is done again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.job import killing
from tests.job.jobs import Job, gyre_json, make, until

pytestmark = [pytest.mark.job, pytest.mark.timeout(400)]
STOP = 30


def stopped(job: Job, log: Path, phase: str, who: str) -> int:
    """An attempt that is stopped in this phase, two steps further; the newest step."""
    done = len(job.steps())
    killing.write(job.paths.root, [{"phase": phase, "who": who, "steps": str(done + 2)}])
    process = killing.start(job, log, 500)
    until(f"stop in {phase}", lambda: process.poll() is not None or not killing.kills_left(job.paths.root), 200)
    assert process.wait(2 * STOP) == 75, log.read_text()
    assert log.read_text().splitlines()[-1] == "stopped by SIGTERM; the same command resumes"
    assert not job.processes()
    newest = max(job.steps())
    assert newest >= done + 2
    saved = job.events("checkpoint")[-1]
    assert (saved["step"], saved["stop"]) == (newest, True), mpi_log(job)
    return newest


def mpi_log(job: Job) -> str:
    return sorted(job.paths.logs.glob("attempt-*/mpi.log"))[-1].read_text()


def test_sigterm_to_everybody_in_the_middle_of_something_saves_the_newest_step(tmp_path: Path) -> None:
    """In a transfer that waits for the gateway, in one that waits for an engine that the signal has ended, and in a publication."""
    deadlines = {"start": 240, "transfer": 20, "step": 60, "idle": 60, "stop": STOP}
    job = make(
        tmp_path,
        run={"steps": 500},
        cells={"count": 2},
        checkpoint={"every": 1000},
        harness={"tool_delay": 0.4},
        deadlines=deadlines,
    )
    log = tmp_path / "out.log"
    newest = []
    for phase, who in (("hold", "everybody"), ("update", "all but the driver"), (killing.PUBLICATION, "all but the driver")):
        newest.append(stopped(job, log, phase, who))
        told = re.findall(r"stop: (?!step|writing).*", mpi_log(job))
        print(phase, told)
    steps = newest[-1] + 1
    killing.write(job.paths.root, [])
    assert killing.start(job, log, steps).wait(200) == 0, log.read_text()
    assert job.steps() == list(range(1, steps + 1))
    assert job.events("steps.again") == []
    assert [event["step"] for event in job.events("resume")] == newest
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
