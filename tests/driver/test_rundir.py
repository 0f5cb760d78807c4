"""A run directory is made once and continued only with the same configuration."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc import configfile
from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.driver.rundir import differences, frozen, prepare
from gyre_hpc.driver.runlock import RunLock
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from trees.records import Group
from trees.store import StoreWriter


def make(root: Path, **sections: Any) -> Config:
    run = {"dir": str(root), "name": "t", **sections.pop("run", {})}
    return check({"run": run, **sections}, "test")


def test_a_new_directory_holds_the_frozen_configuration_and_where_it_came_from(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run", training={"lr": 0.002}))
    assert frozen(paths) == make(tmp_path / "run", training={"lr": 0.002})
    provenance = json.loads(paths.provenance.read_text())
    assert provenance["packages"]["h5py"]
    assert provenance["mpi"].startswith("mpich")
    assert sorted(p.name for p in paths.root.iterdir()) == ["config.yaml", "provenance.json"]


def test_an_empty_configuration_is_no_run_of_defaults(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run", training={"lr": 0.002}))
    paths.config.write_text("")
    for way in (lambda: frozen(paths), lambda: prepare(make(tmp_path / "run"))):
        with pytest.raises(ConfigError, match=r"config\.yaml is empty, a run's has every key; restore it"):
            way()


def test_the_frozen_configuration_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr("gyre_hpc.driver.rundir.sync", lambda path: synced.append((path.name, (tmp_path / "run/config.yaml").exists())))
    prepare(make(tmp_path / "run"))
    assert synced == [(f".config.{os.getpid()}.yaml", False), ("run", True)]


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = prepare(check({"run": {"name": "x"}, "model": {"path": "models/m"}, "tasks": {"source": "tasks"}}, "test"))
    config = frozen(paths)
    assert (config.run.dir, config.model.path, config.tasks.source) == (
        tmp_path / "runs/x",
        str(tmp_path / "models/m"),
        str(tmp_path / "tasks"),
    )


def test_more_steps_continue_and_are_an_event(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run"))
    assert prepare(make(tmp_path / "run")) == paths
    assert not paths.events.exists()
    prepare(make(tmp_path / "run", run={"steps": 40}, slurm={"time_minutes": 5}))
    assert frozen(paths).run.steps == 40
    events = list(read_events(paths.events))
    assert [(e["kind"], e["changes"]) for e in events] == [("config.change", {"run.steps": [20, 40], "slurm.time_minutes": [60, 5]})]


def dispatch(paths: RunPaths) -> None:
    """The first work of a run: one group."""
    with StoreWriter(paths.trees) as store:
        store.append(Group(0, "task", 8, 0, 0))
        store.commit()


def test_another_learning_rate_is_refused_with_both_values_and_nothing_changes(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run"))
    dispatch(paths)
    before = paths.config.read_bytes()
    with pytest.raises(ConfigError, match=r"training\.lr 0\.001 -> 0\.5; set run\.dir"):
        prepare(make(tmp_path / "run", training={"lr": 0.5}, run={"steps": 40}))
    assert paths.config.read_bytes() == before


@pytest.mark.parametrize("evidence", ["weights", "checkpoints", "damage"])
def test_what_has_begun_in_any_way_keeps_its_configuration(tmp_path: Path, evidence: str) -> None:
    paths = prepare(make(tmp_path / "run"))
    if evidence == "damage":
        with StoreWriter(paths.trees):
            pass
        next(paths.trees.glob("journal-*")).write_bytes(b"not a journal, by far not one" * 10)
    else:
        (paths.root / evidence).mkdir()
    with pytest.raises(ConfigError, match=r"`gyre run .*/run` continues it as it is"):
        prepare(make(tmp_path / "run", training={"lr": 0.5}))


def test_a_typo_of_the_first_try_can_be_mended_in_the_same_folder(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run", model={"path": "/typo"}, tasks={"seed": 1}))
    with StoreWriter(paths.trees):
        pass  # the gateway was up, and dispatched nothing
    (paths.tasks / "0").mkdir(parents=True)
    prepare(make(tmp_path / "run"))
    assert frozen(paths).model.path == "builtin:quickstart"
    assert not paths.tasks.exists()
    (event,) = read_events(paths.events)
    assert event["changes"] == {"model.path": ["/typo", "builtin:quickstart"], "tasks.seed": [1, 0]}


def test_nothing_changes_under_a_running_driver(tmp_path: Path) -> None:
    paths = prepare(make(tmp_path / "run"))
    with RunLock(paths.lock), pytest.raises(GyreError, match="is being run by"):
        prepare(make(tmp_path / "run", run={"steps": 40}))
    assert frozen(paths).run.steps == 20


def test_a_folder_with_something_else_is_never_adopted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex but no config\.yaml"):
        prepare(make(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_differences_see_options_inside_a_section() -> None:
    old, new = check({}, "t"), check({"rollout": {"options": {"x": 1}}}, "t")
    assert differences(old, new) == {"rollout.options": ({}, None), "rollout.options.x": (None, 1)}


def test_what_a_full_disk_left_behind_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((os, "replace"), (configfile, "dump")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match=r"No space.*/run"):
                prepare(config)
        assert not list((tmp_path / "run").glob("*config*"))
    prepare(config)
