"""Cells of several ranks: a claim is shared by a cell's ranks, sums go slot by slot, the core's checkpoint has a shard each."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.job.jobs import Job, gyre_json, make, until

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]


def test_two_cells_of_two_ranks_train_and_resume(tmp_path: Path) -> None:
    # without carried-over work nothing is unfinished when a batch is complete, so the satellite always joins
    job = make(tmp_path, run={"steps": 2}, cells={"count": 2, "ranks_per_node": 2}, schedule={"phi": 0.0})
    for steps in (2, 3):
        log = tmp_path / f"{steps}.log"
        assert job.start(log, f"run.steps={steps}").wait(400) == 0, log.read_text()
        assert job.steps() == list(range(1, steps + 1))
    ends = job.events("step.end")
    assert [end["cells"] for end in ends] == [2, 2, 2]
    assert ends[0]["logprob_difference"] < 1e-4
    assert all(end["trained_targets"] <= end["target_tokens"] for end in ends), "every row at most once, whichever rank had it"
    assert sum(end["trained_targets"] for end in ends) > 0
    shards = sorted(path.name for path in job.paths.checkpoint(3).iterdir())
    assert shards == ["COMPLETE", "core-rank00000.h5", "core-rank00001.h5", "state.h5"]
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
    assert not job.processes()


def test_two_cells_whose_ranks_hold_a_shard_of_the_model_each(tmp_path: Path) -> None:
    """A satellite that joins, weights from memory, a stop, a resume, and a rank that is killed while its cell computes together."""
    job = make(
        tmp_path,
        run={"steps": 40},
        cells={"count": 2, "ranks_per_node": 2, "standalone": 1},
        schedule={"phi": 0.0},
        training={"deepspeed": {"zero_optimization": {"stage": 3}}},
    )
    done = 0
    for path in ("direct", "broadcast"):
        log = tmp_path / f"{path}.log"
        process = job.start(log, f"publication.path={path}")
        job.wait_for_steps(process, done + 2, log)
        if path == "direct":
            process.terminate()
        else:
            follower(job).kill()
        assert process.wait(100) == 75, log.read_text()
        assert "the same command resumes" in log.read_text().strip().splitlines()[-1]
        until("the end of all processes", lambda: not job.processes(), 10)
        published = [event["phases"] for event in job.events("publish") if event["version"] > done]
        assert any(phases.get("receive", 0.0) > 0.0 for phases in published), f"{path}: no engine took weights from the core's memory"
        done = max(job.steps())
    assert job.steps() == list(range(1, done + 1)), "what was stopped or killed is not done again: its steps had checkpoints"
    ends = job.events("step.end")
    assert 2 in {end["cells"] for end in ends}
    assert max(end["logprob_difference"] for end in ends) < 1e-3
    assert sum(end["trained_targets"] for end in ends) > 0
    assert {event["cell"] for event in job.events("transfer")} == {0, 1}
    newest = max(step for step in job.steps() if job.paths.checkpoint(step).is_dir() and weights_of(job, step).is_file())
    masters, weights = of_checkpoint(job, newest), load_file(weights_of(job, newest))
    assert set(weights) <= set(masters)
    assert all(np.array_equal(masters[name], tensor.float().numpy().reshape(-1)) for name, tensor in weights.items())
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []


def follower(job: Job) -> psutil.Process:
    """The core's second rank."""
    for process in job.processes():
        if "gyre_hpc.controller.main" in " ".join(process.cmdline()) and process.environ().get("PMI_RANK") == "2":
            return process
    raise AssertionError("no second rank of the core")


def weights_of(job: Job, version: int) -> Path:
    return job.paths.root / "weights" / f"version-{version:06d}" / "model.safetensors"


def of_checkpoint(job: Job, step: int) -> dict[str, NDArray[np.float32]]:
    """Parameters, flat, out of the shards of a checkpoint, as docs/file-formats.md finds them."""
    files = [h5py.File(path) for path in sorted(job.paths.checkpoint(step).glob("core-rank*.h5"))]
    assert len(files) == 2
    joined = np.concatenate([file["master/0"][()] for file in files])
    pieces: dict[str, list[NDArray[np.float32]]] = {}
    for row in files[0]["parameters"][()]:
        pieces.setdefault(row["name"].decode(), []).append(joined[row["offset"] : row["offset"] + row["length"]])
    for file in files:
        file.close()
    return {name: np.concatenate(parts) for name, parts in pieces.items()}
