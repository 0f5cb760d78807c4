"""Mistakes that are told before anything is submitted or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.configfile import check
from gyre_hpc.driver import submit, sweep
from gyre_hpc.driver.inputs import check_inputs
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.errors import ConfigError


def test_the_defaults_are_fine() -> None:
    check_inputs(check({}, "test"))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"dtype": "float16"}}, "float16 can't be trained"),
        ({"model": {"path": "/nowhere"}}, "/nowhere does not exist"),
        ({"model": {"path": __file__}}, "is no folder"),
        ({"model": {"path": str(Path(__file__).parent)}}, r"has no config\.json; give a Hugging Face"),
        ({"tasks": {"source": "/nowhere"}}, "/nowhere is no folder; give a folder of tasks"),
        ({"tasks": {"difficulty": [1, 10]}}, "tasks.difficulty has 10; grades of builtin:chores go from 1 to 9"),
        ({"rollout": {"options": {"foo": 1}}}, r"rollout\.options\.foo is unknown"),
        ({"rollout": {"engine": "vllm", "options": {"port": 1}}}, r"rollout\.options\.port is set by the engine itself"),
    ],
)
def test_a_mistake_is_one_line(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_inputs(check(sections, "test"))


def test_a_folder_without_tasks_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "README").touch()
    with pytest.raises(ConfigError, match="has no folder in it, so no task; give a folder of tasks in Harbor format"):
        check_inputs(check({"tasks": {"source": str(tmp_path)}}, "test"))


def test_nothing_is_submitted_with_a_mistake_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "require_slurm", lambda: None)
    config = check({"run": {"dir": str(tmp_path / "one"), "name": "x"}, "tasks": {"source": "/nowhere"}}, "test")
    with pytest.raises(ConfigError, match="/nowhere is no folder"):
        submit.submit_run(config, prepare(config))
    assert not submit.folder(tmp_path / "one").exists()
    grid = {"model.path": ["builtin:quickstart", "/nowhere"]}
    points = sweep.plan(check({"run": {"dir": str(tmp_path / "s"), "name": "s"}, "sweep": {"grid": grid}}, "test"))
    with pytest.raises(ConfigError, match="/nowhere does not exist"):
        sweep.submit_points(points)
    assert not (tmp_path / "s").exists()
