"""A rank's start: from which checkpoint, and when not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.config import check
from gyre_hpc.controller.main import _checkpoint
from gyre_hpc.errors import GyreError
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths


def test_a_run_begins_without_checkpoint_once_only(tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), check({}, "test")
    assert _checkpoint(config, paths, tmp_path) is None
    EventLog(paths.events).emit("checkpoint", step=7)
    paths.checkpoint(7).mkdir(parents=True)  # without COMPLETE: a copy that was cut off
    with pytest.raises(GyreError, match=r"checkpoints has no usable checkpoint, but events\.jsonl tells of step 7; restore one"):
        _checkpoint(config, paths, tmp_path)
