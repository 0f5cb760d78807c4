"""`gyre simulate` and `gyre plan` as a user calls them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gyre_hpc.cli import main
from gyre_hpc.simulation.workload import LogNormal


def gyre(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["gyre", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_study_as_json_has_what_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre(["simulate", "paper-122b", "--seeds", "1", "--json", "--picture", str(tmp_path / "p")], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"rows", "parameters", "seeds"} <= set(found)
    assert found["seeds"] == 1
    assert all({"id", "reported_hours", "simulated_hours", "low", "high", "fitted"} <= set(row) for row in found["rows"])
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [f"{row['id']}.svg" for row in found["rows"]]


def test_an_unknown_study_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert gyre(["simulate", "paper-122"], monkeypatch) == 2
    there = "there are: paper-122b, paper-24-nodes, paper-2.4t"
    assert capsys.readouterr().err == f"gyre: there is no study paper-122; did you mean paper-122b? {there}\n"


def test_a_plan_from_a_file_of_durations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    work = LogNormal(100.0, 0.2, 0.3)
    trace, picture = tmp_path / "t.jsonl", tmp_path / "plan.svg"
    trace.write_text("".join(json.dumps({"group": g, "seconds": s}) + "\n" for g in range(20) for s in work.group(0, g, 2)))
    options = "--nodes 3 --staleness 0.5 --seeds 1 --steps 3 --groups-per-step 2 --group-size 2 --slots-per-node 4 --train-node-hours 0.02"
    assert gyre(["plan", str(trace), *options.split(), "--picture", str(picture)], monkeypatch) == 0
    assert "best: " in capsys.readouterr().out
    assert picture.read_text().startswith("<svg xmlns=")
    assert gyre(["plan", str(trace), *options.split(), "--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == 3
    assert gyre(["plan", str(trace), "--nodes", "3"], monkeypatch) == 2
    assert "--groups-per-step" in capsys.readouterr().err
    assert gyre(["plan", str(trace), "--nodes", "3", "--picture", str(tmp_path / "nowhere" / "x.svg")], monkeypatch) == 2
    assert "x.svg can't be written; give a file in a folder that exists" in capsys.readouterr().err
