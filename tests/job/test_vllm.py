"""The quickstart on vLLM (CPU): the same job, another engine behind the same interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.jobs import ROOT, gyre_json, make

pytestmark = [pytest.mark.job, pytest.mark.vllm, pytest.mark.timeout(1500)]


def test_the_job_on_vllm(tmp_path: Path) -> None:
    import yaml

    shipped = yaml.safe_load((ROOT / "configs" / "quickstart-vllm.yaml").read_text())
    assert shipped["rollout"]["engine"] == "vllm"
    sections = {name: value for name, value in shipped.items() if name in ("model", "rollout")}
    job = make(tmp_path, **sections, run={"steps": 2}, deadlines={"start": 900, "transfer": 120, "step": 300, "idle": 300})
    log = tmp_path / "out.log"
    assert job.start(log).wait(1400) == 0, log.read_text()
    assert job.steps() == [1, 2]
    assert job.events("execution.lost") == []
    assert job.events("step.end")[0]["logprob_difference"] < 1e-4
    assert gyre_json("trees", "verify", str(job.paths.root))["problems"] == []
    assert not job.processes()
