"""`gyre trees import` and `export` as commands: exit codes, one line an error, and the fields that the documents name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gyre_hpc.cli import main
from tests.imports.sessions import request, session, write

DOCUMENT = Path(__file__).parents[2] / "docs" / "file-formats.md"


def gyre(*words: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gyre", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
    return int(caught.value.code or 0)


def named(row: str) -> set[str]:
    """Fields in the row of the table that begins like this."""
    (line,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {row}")]
    return set(re.findall(r"`([a-z_-]+)`", line.split("|")[2]))


def test_import_stats_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = write(tmp_path / "t.jsonl", session(request([1, 2], 1, 3), request([1, 2, 3], 2, 1), name="one"))
    store, lines = tmp_path / "store", tmp_path / "trees.jsonl"
    assert gyre("trees", "import", traces, "--out", store, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == named("`gyre trees import")
    assert gyre("trees", "stats", store, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == named("`gyre trees stats") | named("the same, of imported traces")
    assert (found["unique_blocks"], found["expanded_blocks"]) == (3, 5)
    assert (found["stored_tokens"], found["sampled_tokens"]) == (15, 4)
    assert gyre("trees", "stats", store, "--executions", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == named("the same with `--executions`")
    assert (row["calls"], row["clean"], row["drift"], row["incomplete"]) == (2, 2, 0, False)
    assert gyre("trees", "stats", store, "--executions") == 0
    assert "side-query" in capsys.readouterr().out
    for _ in range(2):
        assert gyre("trees", "export", store, "--format", "jsonl", "--out", lines, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert set(said) == named("`gyre trees export")
        assert (said["executions"], said["bytes"]) == (1, lines.stat().st_size)
    (row,) = map(json.loads, lines.read_text().splitlines())
    assert row["task"] == "one"
    assert sum(len(node["tokens"]) for node in row["nodes"]) == 15
    assert gyre("trees", "import", traces, "--out", tmp_path / "other") == 0
    assert "sessions  1" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = write(tmp_path / "t.jsonl", session(request([1], 0, 1)))
    store = tmp_path / "store"
    assert gyre("trees", "import", traces, "--out", store) == 0
    capsys.readouterr()
    for words, line in (
        (("import", traces, "--out", store), "exists; give a new folder"),
        (("import", tmp_path / "nowhere", "--out", tmp_path / "x"), "is no file; give a JSONL file"),
        (("import", traces), "Missing option '--out'"),
        (("export", store, "--out", tmp_path / "no" / "where"), "can't be written; give a file in a folder that exists"),
        (("export", store, "--format", "csv", "--out", tmp_path / "x"), "--format csv; one of jsonl, parquet, atif"),
        (("export", store, "--format", "atif", "--out", tmp_path / "x"), "whose tokens are synthetic; there is no text to export"),
        (("export", tmp_path, "--out", tmp_path / "x"), "holds no trajectory trees"),
    ):
        assert gyre("trees", *words) in (1, 2)
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "t.jsonl"]
