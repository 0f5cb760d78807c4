"""Reading traces: the format, one session at a time, and every departure in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.imports.traces import read_sessions
from tests.imports.sessions import Row, agent, request, session, write


def test_plain_and_gzip_read_the_same(tmp_path: Path) -> None:
    row = session(request([1, 2], 3, 5), agent(request([7], 0, 1), name="x"), request([], 2, 0, stop="max_tokens"), name="n")
    plain = write(tmp_path / "a", row)
    zipped = tmp_path / "b"
    zipped.write_bytes(gzip.compress(plain.read_bytes() + b"\n"))
    for path in (plain, zipped):
        (found,) = read_sessions(path)
        assert (found.name, found.block_size) == ("n", 4)
        assert [(r.prompt, r.output, r.agent, r.finish) for r in found.requests] == [
            (11, 5, "", "stop"),
            (4, 1, "x", "stop"),
            (2, 0, "", "length"),
        ]
        assert [r.blocks.tolist() for r in found.requests] == [[1, 2], [7], []]


def test_sessions_come_one_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t", session(request([1])))
    path.write_text(path.read_text() + "{")
    lines = read_sessions(path)
    assert next(lines).name == "s"
    with pytest.raises(ConfigError, match=r"t line 2 is no session trace .*; one session a line"):
        next(lines)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "s", "requests": []}, "no key 'block_size'"),
        (session({"in": 4, "out": 1}), "no key 'hash_ids'"),
        (session({"in": 9, "out": 1, "hash_ids": [1]}), "1 block ids for a prompt of 9 tokens in blocks of 4"),
        (session({"in": 0, "out": 1, "hash_ids": []}), "in = 0: a whole number from 1 on"),
        (session({"in": 4, "out": "1", "hash_ids": [1]}), "out = '1': a whole number from 0 on"),
        ({"id": "s", "block_size": 4, "requests": [3]}, "line 1 is no session trace"),
        ([1], "line 1 is no session trace"),
    ],
)
def test_other_lines_are_refused(row: Row, words: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as caught:
        list(read_sessions(tmp_path / "t"))
    assert words in caught.value.line


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(session(request([1]))).encode())
    for n, damaged in enumerate((whole[:-9], whole[:12] + b"\xff\xff\xff" + whole[15:])):
        path = tmp_path / str(n)
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            list(read_sessions(path))
    with pytest.raises(ConfigError, match="is no file"):
        list(read_sessions(tmp_path / "nowhere"))
