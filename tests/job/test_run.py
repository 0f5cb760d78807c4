"""The main job, small: real harnesses, gateway, engines, trainers and MPI ranks, by the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.job.jobs import Job, gyre, gyre_json, make, until

pytestmark = [pytest.mark.job, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that ran to its end; `status` is asked from outside while it runs."""
    folder = tmp_path_factory.mktemp("job")
    job = make(folder)
    process = job.start(folder / "out.log")
    until("first step", lambda: job.steps() or process.poll() is not None, 300)
    found = gyre_json("status", str(job.paths.root))
    assert found["state"] in ("running", "done")
    assert found["steps"] == 3
    assert process.wait(200) == 0, (folder / "out.log").read_text()
    assert "report: " in (folder / "out.log").read_text()
    return job


def test_every_step_is_taken_once_and_nothing_is_lost(finished: Job) -> None:
    assert finished.steps() == [1, 2, 3]
    assert finished.events("execution.lost") == []
    assert {event["reason"] for event in finished.events("execution.end")} <= {"finished", "timeout"}
    assert not finished.processes()


def test_cells_swap_roles_in_order_and_come_back(finished: Job) -> None:
    transfers = [(event["cell"], event["to"]) for event in finished.events("transfer")]
    assert transfers[0] == (0, "training"), "the core goes first"
    training = 0
    for cell, to in transfers:
        if to == "training":
            assert cell == training, "the cells in training are a prefix"
        training += 1 if to == "training" else -1
    assert sum(to == "training" for _, to in transfers) >= 3


def test_the_engine_and_the_trainer_agree_on_what_was_sampled(finished: Job) -> None:
    """Behaviour log-probs of the newest weights are the trainer's own to 1e-4."""
    first = finished.events("step.end")[0]
    assert first["token_staleness"] == 0.0
    assert first["logprob_difference"] < 1e-4


def test_the_trees_are_whole_and_branch(finished: Job) -> None:
    found = gyre_json("trees", "stats", str(finished.paths.root))
    assert found["executions"] >= 24
    assert found["incomplete"] == 0
    assert found["leaves"] > found["executions"], "with these probabilities some harness forks its context"
    assert found["expanded_tokens"] > found["stored_tokens"]
    assert set(found["differences"]) - {"clean"}, "compactions, sub-agents or retries were recognised"
    assert gyre_json("trees", "verify", str(finished.paths.root))["problems"] == []
    rows = gyre_json("trees", "ls", str(finished.paths.root))
    outline = gyre("trees", "show", str(finished.paths.root), str(rows[0]["execution"])).stdout
    assert "tokens" in outline


def test_h5dump_explains_the_file(finished: Job) -> None:
    segment = sorted(finished.paths.trees.glob("*.h5"))[0]
    header = subprocess.run(["h5dump", "-H", str(segment)], capture_output=True, text=True, check=True).stdout
    for name in ("tokens", "logprobs", "versions", "parent", "schema", "description"):
        assert f'"{name}"' in header, name


def test_the_report_is_one_file_with_every_picture(finished: Job) -> None:
    page = finished.paths.report.read_text()
    for title in ("Score per step", "What every cell did", "Staleness", "How executions ended", "One trajectory tree"):
        assert title in page
    assert page.count("<svg") >= 6
    assert "http://" not in page
    assert "https://" not in page


def test_the_same_command_on_a_finished_run_does_nothing_and_more_steps_continue(finished: Job, tmp_path: Path) -> None:
    before = finished.events("step.end")
    assert finished.start(tmp_path / "again.log").wait(120) == 0
    assert finished.events("step.end") == before
    assert finished.start(tmp_path / "more.log", "run.steps=4").wait(200) == 0, (tmp_path / "more.log").read_text()
    assert finished.steps() == [1, 2, 3, 4]
