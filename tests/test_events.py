"""The event log: ordered by a dense seq over several writers, whole lines only, nothing half-written stays."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.events import EventLog, EventTail, read_events


def test_seq_is_dense_and_starts_at_zero(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert [log.emit("a"), log.emit("b", x=1)] == [0, 1]
    assert [(e["seq"], e["kind"]) for e in read_events(log.path)] == [(0, "a"), (1, "b")]
    assert [e["kind"] for e in read_events(log.path, start=1)] == ["b"]
    assert list(read_events(tmp_path / "none.jsonl")) == []


def _write(path: Path, name: str) -> None:
    log = EventLog(path)
    for i in range(40):
        log.emit(name, i=i)
        if i % 7 == 0:
            log.forget()  # another writer waits for the file that is removed here


def test_several_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, name)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    events = list(read_events(path))
    assert [e["seq"] for e in events] == list(range(120))
    for name in ("a", "b", "c"):
        assert [e["i"] for e in events if e["kind"] == name] == list(range(40)), "each writer's own order is kept"


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_tail_is_skipped_by_readers_and_cut_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("whole", text="x" * 100_000)
    log.emit("torn")
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    assert [e["kind"] for e in read_events(log.path)] == ["whole"]
    assert log.emit("next") == 1
    assert [(e["seq"], e["kind"]) for e in read_events(log.path)] == [(0, "whole"), (1, "next")]


def test_a_tail_reads_what_is_new(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    tail = EventTail(log.path)
    assert tail.read() == []
    log.emit("a")
    assert [e["kind"] for e in tail.read()] == ["a"]
    assert tail.read() == []
    log.emit("b")
    log.emit("c")
    assert [e["kind"] for e in tail.read()] == ["b", "c"]


def test_a_run_at_rest_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("a")
    log.forget()
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]
    assert log.emit("b") == 1


@pytest.mark.parametrize("garbage", [b"garbage\n", b"{}\n", b"[1]\n", b'{"seq": "x", "kind": "a"}\n', b"\xff\xfe\n"])
def test_what_somebody_else_wrote_is_named_with_its_place(tmp_path: Path, garbage: bytes) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    tail = EventTail(log.path)
    log.emit("a")
    size = log.path.stat().st_size
    with open(log.path, "ab") as f:
        f.write(garbage)
    before = log.path.read_bytes()
    for attempt in (lambda: list(read_events(log.path)), tail.read, lambda: log.emit("b")):
        with pytest.raises(GyreError, match=rf"events\.jsonl is damaged at byte {size}"):
            attempt()
    assert log.path.read_bytes() == before
