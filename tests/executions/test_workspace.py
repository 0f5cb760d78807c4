"""Workspaces against what agents leave in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.executions import workspace
from gyre_hpc.executions.workspace import Caps, Folder, Usage

CAPS = Caps(size=1 << 20, entries=100)


def test_prepare_copies_the_environment_and_starts_afresh(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    (environment / "sub").mkdir(parents=True)
    (environment / "sub/run.sh").write_text("x")
    (environment / "sub/run.sh").chmod(0o755)
    (environment / "Dockerfile").write_text("FROM scratch")
    (environment / "link").symlink_to("sub/run.sh")
    os.mkfifo(environment / "pipe")
    folder = workspace.folder_of(tmp_path / "workspaces", 2, 17)
    for _ in range(2):
        workspace.prepare(folder, environment, CAPS)
        assert sorted(path.name for path in folder.work.rglob("*")) == ["link", "run.sh", "sub"]
        assert os.readlink(folder.work / "link") == "sub/run.sh"
        assert os.access(folder.work / "sub/run.sh", os.X_OK)
        (folder.work / "left").write_text("from the attempt before")


def test_a_task_without_environment_gets_an_empty_workspace(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "e")
    workspace.prepare(folder, tmp_path / "none", CAPS)
    assert list(folder.work.iterdir()) == []


def test_links_out_are_copied_as_links_never_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "folder").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").symlink_to(tmp_path / "secret")
    (tmp_path / "source/all").symlink_to("/")
    workspace.copy(tmp_path / "source", tmp_path / "folder", CAPS)
    assert (tmp_path / "folder/file").is_symlink()
    assert (tmp_path / "folder/all").is_symlink()
    assert workspace.usage(tmp_path / "folder", CAPS) == Usage(size=0, entries=2, over=False)


def test_caps_count_sparse_files_in_full_and_stop_early(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert workspace.usage(tmp_path, CAPS).over
    with pytest.raises(GyreError, match="1 MiB"):
        workspace.copy(tmp_path, tmp_path / "sparse-copy", CAPS)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(300):
        (many / str(number)).touch()
    assert workspace.usage(many, CAPS) == Usage(size=0, entries=101, over=True)


def test_what_is_deeper_than_a_path_may_be_long_is_over_and_can_be_removed(tmp_path: Path) -> None:
    script = "import os\nfor _ in range(1100): os.mkdir('dddddd'); os.chdir('dddddd')"
    (tmp_path / "w").mkdir()
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "w", check=True)
    assert workspace.usage(tmp_path / "w", Caps(entries=10_000)).over
    workspace.remove(tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_removing_does_not_follow_links_and_minds_no_modes(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "w/closed").mkdir(parents=True)
    (tmp_path / "w/closed/file").touch()
    (tmp_path / "w/out").symlink_to(tmp_path / "outside")
    (tmp_path / "w/closed").chmod(0)
    workspace.remove(tmp_path / "w")
    assert not (tmp_path / "w").exists()
    assert (tmp_path / "outside/kept").exists()
    workspace.remove(tmp_path / "w")


def test_a_sweep_takes_earlier_attempts_only(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        workspace.folder_of(tmp_path, attempt, 5).root.mkdir()
    (tmp_path / "notes").mkdir()
    assert workspace.sweep(tmp_path, 3) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["003-5", "notes"]
    assert workspace.sweep(tmp_path / "none", 3) == 0
