"""Which cgroups are tried, and that one bounds the number of processes where it is to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.executions import cgroups

V1 = "9:name=systemd:/\n8:pids:/user/a\n4:memory:/m\n0::/x\n"


def test_v2_is_tried_first_then_v1_from_the_inside_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    tried = [(str(parent.path), parent.kind) for parent in cgroups._candidates(V1)]
    assert tried[0] == ("/sys/fs/cgroup/x", "v2")
    assert tried[-3:] == [("/sys/fs/cgroup/pids/user/a", "v1"), ("/sys/fs/cgroup/pids/user", "v1"), ("/sys/fs/cgroup/pids", "v1")]
    assert all("memory" not in path for path, _ in tried)


def test_inside_a_slurm_job_only_our_own_group_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    tried = [str(parent.path) for parent in cgroups._candidates("8:pids:/slurm/job_1\n0::/slurm/job_1\n")]
    assert tried == ["/sys/fs/cgroup/slurm/job_1", "/sys/fs/cgroup/unified/slurm/job_1", "/sys/fs/cgroup/pids/slurm/job_1"]


def test_a_group_holds_its_limit_and_goes(tmp_path: Path) -> None:
    parent = cgroups.Parent(tmp_path, "v2")
    group = parent.create(17)
    assert (group.path / "pids.max").read_text() == "17\n"
    assert parent.create(17).path != group.path
    assert group.enter()[-1] == str(group.path / "cgroup.procs")


def test_a_plain_folder_is_no_cgroup(tmp_path: Path) -> None:
    assert not cgroups._works(cgroups.Parent(tmp_path, "v2"))
    assert list(tmp_path.iterdir()) == []


def test_groups_that_were_busy_a_moment_ago_go_with_their_maker(tmp_path: Path) -> None:
    parent, other = cgroups.Parent(tmp_path, "v2"), tmp_path / "gyre-box-1-0"
    other.mkdir()
    groups = [parent.create(5) for _ in range(3)]
    for group in groups:
        (group.path / "pids.max").unlink()  # the kernel's own files don't hinder an rmdir, a plain folder's do
    groups[0].path.joinpath("busy").touch()
    parent.tidy(0.1)
    assert sorted(tmp_path.iterdir()) == sorted([other, groups[0].path])
    groups[0].path.joinpath("busy").unlink()
    parent.tidy(0.1)
    assert list(tmp_path.iterdir()) == [other]
