"""Checkpoints without a model: whole or absent, verified, refused with both numbers, and safe against kill -9 and full disks."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from gyre_hpc.checkpoint import (
    MARKER,
    CoreState,
    Identity,
    RunState,
    candidates,
    core_name,
    latest,
    model_fingerprint,
    read_core,
    read_state,
)
from gyre_hpc.checkpoint import damage as damage_of
from gyre_hpc.checkpoint_writer import begin, commit, save, write_core, write_state
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.paths import RunPaths


def core_state(rank: int = 0, ranks: int = 1, size: int = 1000, version: int = 1) -> CoreState:
    rng = np.random.default_rng(version * 100 + rank)
    arrays = {
        "master/0": rng.normal(size=size).astype(np.float32),
        "optimizer/0/exp_avg": rng.normal(size=size).astype(np.float32),
        "optimizer/0/step": np.array([version], np.float32),
        "rng/torch": rng.integers(0, 255, 100).astype(np.uint8),
    }
    return CoreState(rank, ranks, size * ranks, "M #1", version, arrays, [("w.a", 0, 0, 600), ("w.b", 0, 600, 400)])


def run_state(step: int) -> RunState:
    return RunState(step, step, {"burst": step, "large": 2**90})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def saved(paths: RunPaths, *steps: int, keep: int = 9) -> None:
    for step in steps:
        save(paths, [core_state(version=step)], run_state(step), keep)


def names(paths: RunPaths) -> list[str]:
    return sorted(child.name for child in paths.checkpoints.iterdir())


def test_what_is_written_is_read_back_on_every_rank(paths: RunPaths) -> None:
    cores = [core_state(rank, 3) for rank in range(3)]
    save(paths, cores, run_state(4), 2)
    found = latest(paths)
    assert found is not None
    assert (found.step, found.core_ranks, found.bytes) == (4, 3, sum(f.stat().st_size for f in found.directory.glob("*.h5")))
    assert read_state(found) == run_state(4)
    for core in cores:
        read = read_core(found, core.rank)
        assert read.arrays.keys() == core.arrays.keys()
        assert all(np.array_equal(read.arrays[k], core.arrays[k]) and read.arrays[k].dtype == core.arrays[k].dtype for k in core.arrays)
        assert (read.rank, read.identity, read.version, read.table) == (core.rank, core.identity, core.version, core.table)


def test_no_checkpoint_is_none(paths: RunPaths) -> None:
    assert latest(paths) is None


def test_the_newest_are_kept(paths: RunPaths) -> None:
    saved(paths, 1, 2, 3, keep=2)
    assert names(paths) == ["step-000002", "step-000003"]


def test_damaged_ones_of_later_steps_do_not_push_out_the_one_that_was_just_made(paths: RunPaths) -> None:
    saved(paths, 5, 10, 11)
    for step in (10, 11):
        (paths.checkpoint(step) / core_name(0)).write_bytes(b"")
    saved(paths, 6, 7, keep=2)
    assert names(paths) == ["step-000006", "step-000007", "step-000010", "step-000011"]
    found = latest(paths)
    assert found is not None
    assert found.step == 7


def test_the_same_step_again_replaces(paths: RunPaths) -> None:
    saved(paths, 1, 1)
    assert names(paths) == ["step-000001"]
    assert latest(paths) is not None


@pytest.mark.parametrize("damage", ["marker", "missing", "short", "flipped", "garbled"])
def test_a_damaged_checkpoint_is_skipped_with_one_warning(paths: RunPaths, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(paths, 1, 2)
    newest = paths.checkpoint(2)
    target = newest / core_name(0)
    data = target.read_bytes()
    if damage == "marker":
        (newest / MARKER).unlink()
    elif damage == "missing":
        target.unlink()
    elif damage == "short":
        target.write_bytes(data[:-1])
    elif damage == "flipped":
        target.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    else:
        (newest / MARKER).write_text('{"schema"')
    with caplog.at_level(logging.WARNING):
        found = latest(paths)
    assert found is not None
    assert found.step == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "step-000002 skipped" in caplog.text


def test_one_that_can_t_be_read_now_is_not_passed_by(paths: RunPaths) -> None:
    """It may be whole. A link to itself can't be opened by root either."""
    saved(paths, 1, 2)
    newest = latest(paths)
    assert newest is not None
    shard = newest.directory / core_name(0)
    shard.unlink()
    with pytest.raises(Resumable, match=r"step-000002 can't be read on this node: .*core-rank00000\.h5.*; see its file system"):
        damage_of(newest, newest.parts[0])  # rank 0 has seen it: another node does not show it
    shard.symlink_to(shard)
    with pytest.raises(Resumable, match=r"step-000002 can't be read on this node: .*core-rank00000\.h5.*; see its file system"):
        next(candidates(paths))
    (newest.directory / MARKER).unlink()
    (newest.directory / MARKER).symlink_to(newest.directory / MARKER)
    with pytest.raises(Resumable, match=f"can't be read on this node: .*{MARKER}"):
        latest(paths)


def test_an_unfinished_one_is_not_seen_and_cleared_by_the_next(paths: RunPaths) -> None:
    saved(paths, 1)
    write_core(begin(paths, 2), core_state())
    found = latest(paths)
    assert found is not None
    assert found.step == 1
    saved(paths, 3)
    assert names(paths) == ["step-000001", "step-000003"]


def test_commit_refuses_missing_parts(paths: RunPaths) -> None:
    saved(paths, 1)
    partial = begin(paths, 2)
    parts = [write_core(partial, core_state(1, 2)), write_state(partial, run_state(2))]
    with pytest.raises(GyreError, match=r"core-rank00000\.h5"):
        commit(partial, parts, 1)
    with pytest.raises(GyreError, match="expected"):
        commit(partial, parts[:1], 1)
    assert latest(paths) is not None


def test_identity_names_both_numbers() -> None:
    had = Identity("A #1", 1000, 2)
    had.require(Identity("A #1", 1000, 2))
    for now, both in (
        (Identity("B #2", 1000, 2), "model A #1, this run has B #2"),
        (Identity("A #1", 999, 2), "parameters 1000, this run has 999"),
        (Identity("A #1", 1000, 3), "core ranks 2, this run has 3"),
    ):
        with pytest.raises(ConfigError) as caught:
            had.require(now)
        assert both in caught.value.line
        assert caught.value.remedy


def test_a_rank_that_is_not_there_is_refused(paths: RunPaths) -> None:
    saved(paths, 1)
    found = latest(paths)
    assert found is not None
    found.require("M #1", 1)
    with pytest.raises(ConfigError, match="core ranks 1"):
        read_core(found, 1)
    with pytest.raises(ConfigError, match="core ranks 1, this run has 2"):
        found.require("M #1", 2)


def test_fingerprint_tells_configuration_and_tokenizer_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 8}))
    first = model_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    second = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 16}))
    third = model_fingerprint(tmp_path)
    assert first.startswith("X hidden_size=8 #")
    assert len({first, second, third}) == 3


def test_files_explain_themselves_to_plain_hdf5(paths: RunPaths) -> None:
    saved(paths, 1)
    with h5py.File(paths.checkpoint(1) / core_name(0)) as f:
        assert f.attrs["schema"] == 1
        assert f["master/0"].fletcher32
        assert "master weights" in f["master/0"].attrs["description"]
        assert f["parameters"][1]["name"] == b"w.b"
    if dump := shutil.which("h5dump"):
        text = subprocess.run([dump, "-H", paths.checkpoint(1) / "state.h5"], capture_output=True, text=True, check=True).stdout
        assert "policy" in text


_FILL = """
import resource, signal, sys
from pathlib import Path
from gyre_hpc.paths import RunPaths
from tests.test_checkpoint import core_state, run_state
from gyre_hpc import checkpoint_writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint_writer.save(RunPaths(Path(sys.argv[1])), [core_state(version=2, size=300000)], run_state(2), 1)
except checkpoint_writer.Resumable as error:
    print(error.line)
"""


@pytest.mark.parametrize("limit", [1500, 100_000, 2_300_000])
def test_when_the_disk_takes_no_more_the_old_one_stays(paths: RunPaths, limit: int) -> None:
    """A file size limit makes the operating system refuse writes at the start, in the middle and at the end of a file."""
    saved(paths, 1)
    done = subprocess.run([sys.executable, "-c", _FILL, str(paths.root), str(limit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "intact" in done.stdout
    assert done.stdout.count("\n") == 1
    assert names(paths) == ["step-000001"]
    found = latest(paths)
    assert found is not None
    assert read_state(found) == run_state(1)


_LOOP = """
import sys
from pathlib import Path
from gyre_hpc.paths import RunPaths
from tests.test_checkpoint import core_state, run_state
from gyre_hpc import checkpoint_writer
for step in range(int(sys.argv[2]), 10**6):
    checkpoint_writer.save(RunPaths(Path(sys.argv[1])), [core_state(version=step, size=50000)], run_state(step), 2)
    print(step, flush=True)
"""


def test_kill_nine_while_writing_leaves_a_usable_one(paths: RunPaths) -> None:
    """Killed at several moments; each next writer continues, and what was reported as done is there."""
    done = 0
    for delay in (0.0, 0.011, 0.023, 0.037, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", _LOOP, str(paths.root), str(done + 1)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        reported = int(rest[-1]) if rest else done + 1
        found = latest(paths)
        assert found is not None
        assert found.step >= reported
        core = read_core(found, 0)
        assert np.array_equal(core.arrays["master/0"], core_state(version=found.step, size=50000).arrays["master/0"])
        assert len(list(paths.checkpoints.glob("step-??????"))) <= 3
        done = found.step
