"""What a job's limit leaves, in folders that look like cgroups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gyre_hpc import memory

GIB = 1 << 30


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def left(tmp_path: Path, table: str) -> list[int]:
    (tmp_path / "table").write_text(table)
    return memory.left_below_limits(tmp_path / "table", tmp_path / "fs")


def test_the_jobs_limit_stands_above_the_step_and_file_cache_counts_as_free(tmp_path: Path) -> None:
    job = tmp_path / "fs/system.slice/slurmstepd.scope/job_7"
    stat = f"anon 1\ninactive_file {GIB}\nactive_file {2 * GIB}\n"
    group(job, memory__max=64 * GIB, memory__high="max", memory__current=60 * GIB, memory__stat=stat)
    group(job / "step_0", memory__max="max", memory__high="max", memory__current=50 * GIB)
    assert left(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0\n") == [7 * GIB]
    group(job / "step_0", memory__high=52 * GIB)
    assert min(left(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0\n")) == 2 * GIB


def test_version_1_and_hybrid_hierarchies(tmp_path: Path) -> None:
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\n"
    group(tmp_path / "fs/memory/slurm/job_7", memory__limit_in_bytes=8 * GIB, memory__usage_in_bytes=6 * GIB, memory__stat=stat)
    group(tmp_path / "fs/unified/slurm", memory__max=4 * GIB, memory__current=3 * GIB)
    table = "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n0::/slurm\n"
    assert left(tmp_path, table) == [3 * GIB, GIB]


def test_a_container_whose_own_group_is_the_root_of_its_mount(tmp_path: Path) -> None:
    group(tmp_path / "fs", memory__max=4 * GIB, memory__current=5 * GIB)
    assert left(tmp_path, "0::/\n") == [0]
    assert left(tmp_path, "0::/docker/abc\n") == [0]  # no namespace: the path is the host's, and not below our mount


def test_no_limit_and_no_cgroups_say_nothing(tmp_path: Path) -> None:
    group(tmp_path / "fs/a", memory__max="max", memory__current=5)
    assert left(tmp_path, "0::/a\n") == []
    assert memory.left_below_limits(tmp_path / "none") == []


def test_the_smallest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "left_below_limits", lambda: [7 * GIB, 3])
    assert memory.available() == 3
    monkeypatch.setattr(memory, "left_below_limits", lambda: [1 << 62])
    assert 0 < memory.available() <= psutil.virtual_memory().total
