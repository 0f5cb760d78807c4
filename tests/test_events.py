"""The event log: ordered by a dense seq over several writers, whole lines only, nothing half-written stays."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

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
