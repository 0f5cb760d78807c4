"""A run whose configuration another version froze: it can be looked at, and only running it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gyre_hpc import cli
from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths
from gyre_hpc.viewing import see


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Of a version that had `rollout.warp` and a whole section `oracle`, and allowed a step of no groups."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    tree = Config().model_dump(mode="json")
    tree["run"].update(name="old", steps=7)
    tree["rollout"]["warp"] = 9
    tree["oracle"] = {"on": True}
    tree["schedule"]["groups_per_step"] = 0
    paths.config.write_text(yaml.safe_dump(tree))
    EventLog(paths.events).emit("run.start", attempt=1, nodes=["n1"])
    return paths


def test_what_this_version_does_not_take_is_left_out_and_named(run: RunPaths) -> None:
    seen = see(run.config)
    assert set(seen.left_out) == {"rollout.warp", "oracle", "schedule.groups_per_step"}
    assert (seen.config.run.steps, seen.config.schedule.groups_per_step) == (7, Config().schedule.groups_per_step)


def test_a_run_of_this_version_is_read_whole(run: RunPaths) -> None:
    run.config.write_text("run: {steps: 3}\n")
    seen = see(run.config)
    assert (seen.config.run.steps, seen.left_out, seen.warning) == (3, (), None)


def test_a_file_that_was_lost_is_told(run: RunPaths) -> None:
    run.config.write_text("")
    assert see(run.config).warning == "config.yaml is empty, what it said is lost"


def test_a_section_that_is_none_any_more_is_left_out(run: RunPaths) -> None:
    run.config.write_text("run: 3\nmodel: {window: [1]}\n")
    assert see(run.config).left_out == ("run", "model.window")


def test_a_file_without_sections_is_refused(run: RunPaths) -> None:
    run.config.write_text("[1]\n")
    with pytest.raises(ConfigError, match="holds a list; write sections"):
        see(run.config)


@pytest.mark.parametrize("command", [["status"], ["report"], ["status", "--json"]])
def test_it_can_be_looked_at(
    run: RunPaths, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gyre(monkeypatch, command[0], str(run.root), *command[1:]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "is of another version of gyre, these keys can't be read: " in err
    if "--json" in command:
        assert json.loads(out)["steps"] == 7


@pytest.mark.parametrize("command", [["plan", "--nodes", "2"], ["trees", "export", "--out", "x"]])
def test_what_is_made_of_its_configuration_is_told_too(
    run: RunPaths, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan would stand on defaults that were not the run's. (There is nothing in this run to plan from, or to export.)"""
    monkeypatch.chdir(run.root.parent)
    gyre(monkeypatch, *command, str(run.root))
    assert "is of another version of gyre, these keys can't be read: " in capsys.readouterr().err


def test_running_it_is_refused(run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gyre(monkeypatch, "run", str(run.root)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown key" in line or "groups_per_step" in line
    assert "version of gyre" in line


def gyre(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command; its exit code."""
    monkeypatch.setattr("sys.argv", ["gyre", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
