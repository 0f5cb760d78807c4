"""What a killed supervisor left in the node's temporary folder is removed by the next one of its run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from gyre_hpc.executions.scratch import scratch


def test_a_killed_ones_folder_goes_with_the_next_and_those_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = tmp_path / "run"
    killed = scratch(run, "n1")
    stale = killed.__enter__()  # and never left
    with scratch(run, "n2") as neighbour, scratch(tmp_path / "other", "n1") as foreign:
        with scratch(run, "n1") as own:
            assert not stale.exists()
            assert len({own, neighbour, foreign}) == 3
            assert all(folder.is_dir() for folder in (own, neighbour, foreign))
        assert not own.exists()
        assert neighbour.is_dir()
    assert list(tmp_path.iterdir()) == []
