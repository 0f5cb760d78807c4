"""Cells of several ranks: a claim is shared by a cell's ranks, sums go slot by slot, the core's checkpoint has a shard each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.jobs import gyre_json, make

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
