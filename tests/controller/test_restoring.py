"""From which checkpoint an attempt goes on, and how long that may take."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cells.communicators import Communicators, Layout
from gyre_hpc.checkpoint import Checkpoint, Part, aside, core_name, damage, latest, model_fingerprint
from gyre_hpc.checkpoint_writer import begin, commit, save, write_core, write_state
from gyre_hpc.configfile import check
from gyre_hpc.controller.restoring import Progress, agree, meet, patience
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths
from tests.cells.ranks import run_ranks
from tests.test_checkpoint import core_state, run_state


class FakeWorld:
    """In place of a communicator of one rank: its barrier is reached by all at the look with this number."""

    def __init__(self, looks: int = 1) -> None:
        self.looks = looks

    def Get_rank(self) -> int:
        return 0

    def Ibarrier(self) -> FakeWorld:
        return self

    def Test(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def bcast(self, value: Any, root: int) -> Any:
        return value

    def gather(self, value: Any, root: int) -> list[Any]:
        return [value]


def alone() -> Communicators:
    """Rank 0 of a world in which nobody has a shard."""
    world: Any = FakeWorld()
    return Communicators(Layout(1), world, None, None, None, None, ())


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Three checkpoints of two ranks, and the model that they are of."""
    base = tmp_path / "model"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 8}))
    paths = RunPaths(tmp_path)
    for step in (1, 2, 3):
        cores = [dataclasses.replace(core_state(rank, 2, 600, step), model=model_fingerprint(base)) for rank in range(2)]
        save(paths, cores, run_state(step), 9)
    return paths


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_all_ranks_pass_on_together_from_a_damaged_shard(run: RunPaths, tmp_path: Path) -> None:
    """The step that is right is on the command line; the damage of one shard is seen by one rank alone."""
    cases = []
    for name, damaged, right in (
        ("whole", (), 3),
        ("one", ((3, 1),), 2),
        ("both", ((3, 0), (2, 1)), 1),
        ("none", ((3, 0), (2, 1), (1, 1)), 0),
    ):
        folder = tmp_path / "cases" / name
        for step in (1, 2, 3):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            target = RunPaths(folder).checkpoint(step)
            target.mkdir()
            for file in run.checkpoint(step).iterdir():
                (target / file.name).write_bytes(file.read_bytes())
        (folder / "model").symlink_to(tmp_path / "model")
        for step, rank in damaged:
            flip(RunPaths(folder).checkpoint(step) / core_name(rank), 3000)
        cases.append(f"{folder}:{right}")
    done = run_ranks("../controller/mpi_restore.py", 3, *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 3
    assert done.stdout.count("does not match its digest") == 6
    assert done.stdout.count("nothing uses it any more") == 3
    assert [path.name for path in aside(RunPaths(tmp_path / "cases/both"))] == ["step-000002.damaged", "step-000003.damaged"]
    assert aside(RunPaths(tmp_path / "cases/none")) == [], "there is nothing to go on from: a person decides"
    assert "step-000003 skipped: core-rank00001.h5 does not match its digest" in done.stdout


@pytest.mark.parametrize("at", [0, 100, -1, 2500])
def test_a_flipped_bit_anywhere_is_damage(run: RunPaths, at: int) -> None:
    found = latest(run)
    assert found is not None
    part = found.parts[1]
    assert damage(found, part) is None
    flip(found.directory / part.name, at)
    assert damage(found, part) == "core-rank00001.h5 does not match its digest"


def test_a_run_begins_without_checkpoint_once_only(tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), check({}, "test")
    assert agree(alone(), config, paths, tmp_path) is None
    EventLog(paths.events).emit("checkpoint", step=7)
    paths.checkpoint(7).mkdir(parents=True)  # without COMPLETE: a copy that was cut off
    with pytest.raises(GyreError, match=r"checkpoints has no usable checkpoint, but events\.jsonl tells of step 7; restore one"):
        agree(alone(), config, paths, tmp_path)


def test_another_core_or_model_is_refused_before_any_shard_is_read(run: RunPaths, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="core ranks 2, this run has 1"):
        agree(alone(), check({}, "test"), run, tmp_path / "model")
    two = check({"cells": {"ranks_per_node": 2}}, "test")
    assert agree(alone(), two, run, tmp_path / "model") == latest(run)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    for shard in run.checkpoint(3).glob("core-rank*"):
        flip(shard, 3000)
    with pytest.raises(ConfigError, match="the checkpoint has model X"):
        agree(alone(), two, run, tmp_path / "model")
    assert aside(run) == [], "nothing was found damaged"


def test_one_whose_small_file_does_not_tell_its_model_is_refused_behind_its_shards(run: RunPaths, tmp_path: Path) -> None:
    partial = begin(run, 4)
    cores = [write_core(partial, core_state(rank, 2, 600, 4)) for rank in range(2)]
    commit(partial, [*cores, write_state(partial, run_state(4))], 9)
    with pytest.raises(ConfigError, match=r"the checkpoint has model M #1"):
        agree(alone(), check({"cells": {"ranks_per_node": 2}}, "test"), run, tmp_path / "model")


def test_a_state_or_marker_that_is_damaged_is_seen_by_rank_0(run: RunPaths, tmp_path: Path) -> None:
    flip(run.checkpoint(3) / "state.h5", 2000)
    marker = run.checkpoint(2) / "COMPLETE"
    marker.write_text(marker.read_text().replace('"step": 2', '"step": 3'))
    two = check({"cells": {"ranks_per_node": 2}}, "test")
    found = agree(alone(), two, run, tmp_path / "model")
    assert found is not None
    assert found.step == 1
    assert [path.name for path in aside(run)] == ["step-000002.damaged", "step-000003.damaged"]
    told = [(event["kind"], event["step"], event["kept"]) for event in read_events(run.events)]
    assert told == [("checkpoint.damaged", step, f"step-00000{step}.damaged") for step in (3, 2)]
    shutil.copytree(run.checkpoint(1), run.checkpoint(3))
    again = agree(alone(), two, run, tmp_path / "model")
    assert again is not None
    assert again.step == 1
    assert (run.checkpoints / "step-000003.damaged-1").is_dir(), "both are kept"
    for path in aside(run):
        assert (path / "COMPLETE").is_file(), "as they were"


def test_a_read_may_take_as_long_as_its_largest_shard_at_the_slowest() -> None:
    config = check({"deadlines": {"start": 300}, "checkpoint": {"slowest_read": 100}}, "test")
    assert patience(config, None) == 300.0
    parts = (Part(core_name(0), 150_000_000_000, ""), Part(core_name(1), 140_000_000_000, ""), Part("state.h5", 5000, ""))
    assert patience(config, Checkpoint(Path(), 1, parts)) == 300.0 + 1500.0


def test_who_reads_says_how_far_it_is() -> None:
    lines: list[str] = []
    progress = Progress("step 3, core-rank00001.h5", 4_000_000_000, every=0.0, log=lines.append)
    progress.tell(1_000_000_000)
    progress.tell(4_000_000_000)
    progress.end()
    assert [line.split(" (")[0] for line in lines] == [
        "step 3, core-rank00001.h5: 1.00 of 4.00 GB read and checked so far",
        "step 3, core-rank00001.h5: 4.00 of 4.00 GB read and checked so far",
        "step 3, core-rank00001.h5: 4.00 of 4.00 GB read and checked",
    ]
    quick = Progress("small", 10, log=lines.append)
    quick.tell(10)
    quick.end()
    assert len(lines) == 3


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    meet(FakeWorld(3), "all ranks", 60.0)
    with pytest.raises(Resumable, match=r"all ranks: not there after 0\.01 s; .* deadlines\.start .* resumes"):
        meet(FakeWorld(10**9), "all ranks", 0.01)
