"""Plain progress lines, waits, and the verdict on a dead MPI step."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_hpc.driver.ending import verdict
from gyre_hpc.driver.launcher import MPI_STEP, Child
from gyre_hpc.driver.lines import describe, printer, say
from gyre_hpc.driver.waiting import wait_for
from gyre_hpc.errors import Resumable


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"kind": "step.end", "step": 3, "score_mean": 0.25, "loss": -0.1, "staleness_mean": 0.5, "target_tokens": 7, "seconds": 1.25},
            "step 3, score 0.250, loss -0.100, staleness 0.500, 7 target tokens, 1.2 s",
        ),
        ({"kind": "step.end", "step": 3, "score_mean": None}, "step 3"),
        ({"kind": "transfer", "cell": 1, "from": "rollout", "to": "training", "seconds": 0.5}, "cell 1: rollout -> training in 0.50 s"),
        ({"kind": "failure", "seq": 1, "t": 2.0, "what": "x died", "remedy": "resume"}, None),
        ({"kind": "execution.end", "execution": 1}, None),
    ],
)
def test_an_event_is_one_line_or_none(event: dict[str, object], line: str | None) -> None:
    assert describe(event) == line


def test_lines_carry_the_time_of_their_event() -> None:
    said: list[str] = []
    show = printer(said.append)
    show([{"kind": "resume", "t": time.time() + 12.0, "step": 4}, {"kind": "execution.end", "t": 0.0}])
    assert said == ["[   12.0] resume step=4"]


def test_a_wait_says_its_name_at_half_time_and_gives_up_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Resumable, match="waited 0 s for a sign"):
        wait_for("a sign", lambda: None, 0.2)
    assert [record.message for record in caplog.records] == ["still waiting for a sign after 0 s (deadline 0 s)"]
    assert wait_for("a number", lambda: 7, 0.2) == 7


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ("srun: error: n3: task 2: Killed\nsrun: error: n1: task 0: Killed\n", 137, "rank 2 (a cell) was killed by SIGKILL"),
        ("srun: error: n3: task 2: Killed\nsrun: error: n1: task 0: Terminated\n", 143, "rank 2 (a cell) was killed by SIGKILL"),
        ("srun: error: n1: task 0: Exited with exit code 3\n", 3, "the controller (rank 0) ended with status 3"),
        ("=   PID 77 RUNNING AT host\n=   EXIT CODE: 9\n", 9, "a rank of the MPI step (controller or cells) was killed by SIGKILL"),
        ("", 1, "a rank of the MPI step (controller or cells) ended with status 1"),
    ],
)
def test_the_verdict_on_an_mpi_step_that_said_nothing(tmp_path: Path, log: str, status: int, words: str) -> None:
    path = tmp_path / "mpi.log"
    path.write_text(log)
    process = subprocess.Popen(["sh", "-c", f"exit {status}"])
    process.wait()
    assert verdict(Child(MPI_STEP, process, path, 1), tmp_path).what == f"{words}; log: {path}"


def test_of_executions_that_are_lost_together_one_is_told_and_the_others_are_counted() -> None:
    said: list[str] = []
    lost = [{"seq": i, "t": 0.0, "kind": "execution.lost", "execution": i, "reason": "restart"} for i in range(128)]
    printer(said.append)([*lost, {**lost[0], "reason": "node"}])
    assert [line.split("] ")[1] for line in said] == [
        "execution.lost execution=0 reason=restart",
        "execution.lost execution=0 reason=node",
        "execution.lost reason=restart: 127 more",
    ]


@pytest.mark.parametrize("reason", ["Broken pipe", "No space left on device"])
def test_lines_that_nobody_can_get_end_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    read, write = os.pipe()
    os.close(read)
    if reason != "Broken pipe":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(write, "w") as lost:
        monkeypatch.setattr(sys, "stdout", lost)
        say("one")
        say("two")  # and what was buffered goes nowhere when the file is closed
    assert [record.getMessage() for record in caplog.records] == [
        f"no more lines: standard output can't be written ({reason}); the run goes on"
    ]
