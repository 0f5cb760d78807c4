"""The peers of the elastic schedule, live: the whole system runs them, and the roles are what each promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.job.jobs import GYRE, ROOT, Job, make

pytestmark = pytest.mark.job


def run(job: Job, *program: str) -> list[tuple[int, str]]:
    """The whole job, or `program` with its configuration; its transfers in order, (cell, to)."""
    argv = [*program, str(job.config)] if program else [*GYRE, "run", str(job.config), "--plain"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.steps() == [1, 2, 3]
    assert all(event["train_seconds"] > 0 for event in job.events("step.end") if event["rows"])
    for event in job.events("step.end"):
        stale = [event["step"] - 1 - version for version in event["group_versions"]]
        assert len(stale) == len(event["groups"])
        assert event["staleness_mean"] == pytest.approx(sum(stale) / len(stale))
    return [(event["cell"], event["to"]) for event in job.events("transfer")]


def settings(**schedule: Any) -> Mapping[str, Any]:
    return {"groups_per_step": 2, "group_size": 4, "phi": 0.5, **schedule}


@pytest.mark.parametrize(("path", "more"), [("files", set()), ("direct", {"receive", "send"}), ("broadcast", {"receive", "send", "meet"})])
def test_async_moves_its_pools_once_and_publishes_to_the_others(tmp_path: Path, path: str, more: set[str]) -> None:
    job = make(tmp_path, schedule=dict(settings(mode="async", trainers=2, mu=2)), publication={"path": path})
    assert run(job, sys.executable, "-m", "tests.job.weighing", "drive") == [(0, "training"), (1, "training")]
    published = job.events("publish")
    assert [event["version"] for event in published] == [2, 3]
    assert all(set(event["phases"]) == {"write", "close", "load", "verify", "reopen", *more} for event in published)
    assert all(event["phases"]["receive"] > 0 for event in published if more), "nobody had to load files"
    seen = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    core = {entry["version"]: entry["digest"] for entry in seen if (entry["cell"], entry["what"]) == (0, "trainer")}
    assert len(set(core.values())) == 3, "each step changed them"
    for cell, what, versions in ((1, "trainer", [1, 2, 3]), (2, "engine", [2, 3])):
        theirs = {entry["version"]: entry["digest"] for entry in seen if (entry["cell"], entry["what"]) == (cell, what)}
        assert theirs == {version: core[version] for version in versions}, "bit for bit the core's"
    assert all(event["cells"] == 2 for event in job.events("step.end"))


def test_a_cell_whose_weights_come_too_late_stays_in_rollout_and_joins_the_next_burst_with_the_right_ones(tmp_path: Path) -> None:
    """A transfer that fails in a phase is taken back, live; what was sent in vain is not taken for what is sent later."""
    job = make(tmp_path)
    transfers = run(job, sys.executable, "-m", "tests.job.weighing", "late")
    (undone,) = job.events("transfer.undone")
    assert (undone["cell"], undone["to"], undone["from"]) == (1, "training", "rollout")
    assert undone["why"].startswith("restore: the core's weights: not there after 0 s")
    assert [event["phase"] for event in job.events("transfer.phase") if event["undo"]] == [
        "restore",
        "release",
        "acknowledge",
        "hand-over",
        "hold",
        "reserve",
        "unroute",
    ]
    assert (1, "training") in transfers, "in a later burst"
    assert job.events("execution.lost") == []
    newest, pulls = "", 0
    for entry in map(json.loads, (tmp_path / "weights.jsonl").read_text().splitlines()):
        if entry["cell"] == 0 and entry["what"] == "trainer":
            newest = entry["digest"]
        elif entry["what"] == "pulled" and entry["cell"] == 1 and newest:
            assert entry["digest"] == newest
            pulls += 1
    assert pulls > 0


def test_colocate_without_streaming_moves_all_cells_together(tmp_path: Path) -> None:
    job = make(tmp_path, schedule=dict(settings(mode="colocate", streaming=False, phi=0.0, shuffle=True)))
    away = [(cell, "training") for cell in (0, 1, 2)]
    back = [(cell, "rollout") for cell in (2, 1, 0)]
    assert run(job) == [*away, *back, *away, *back, *away]
    leaving = [event for event in job.events("transfer") if event["to"] == "training"]
    assert all(event["live"] == 0 for event in leaving)  # nothing is unfinished when all cells train
    assert all(event["microsteps"] == 1 for event in job.events("step.end") if event["rows"]), "a shuffled step's groups share it"
