import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

import trees.reader
import trees.sealed
from tests.trees.forests import begin, finish
from trees.journal import Scan, frame
from trees.records import Group, Role
from trees.stats import stats
from trees.store import StoreError, StoreReader, StoreWriter
from trees.verify import verify


def test_refresh_reads_only_what_is_new(tmp_path, monkeypatch):
    read = []
    decode = trees.reader.decode
    monkeypatch.setattr(trees.reader, "decode", lambda payload: read.append(len(payload)) or decode(payload))
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        begin(writer)
        writer.context_node(-1, np.arange(10_000), 0, -1, Role.MAIN)
        writer.commit()
        reader.refresh()
        assert sum(read) > 40_000
        read.clear()
        writer.append(Group(1, "u", 1, 0, 0))
        writer.commit()
        reader.refresh()
        reader.refresh()
        assert 0 < sum(read) < 100
        assert list(reader.groups()) == [0, 1]


def test_a_missing_store_is_an_empty_view_until_it_comes(tmp_path):
    with StoreReader(tmp_path / "trees") as reader:
        assert not reader.groups()
        with StoreWriter(tmp_path / "trees") as writer:
            begin(writer)
        reader.refresh()
        assert list(reader.groups()) == [0]
    with pytest.raises(StoreError, match="holds no trajectory trees"):
        stats(tmp_path / "nothing")


def test_a_commit_that_was_taken_back_is_seen_anew(tmp_path, monkeypatch):
    """A reader may see a frame whose fsync fails; what is written in its place must be seen instead."""
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        begin(writer)
        writer.commit()
        reader.refresh()

        def fail(fd):
            reader.refresh()
            raise OSError(28, "no space left")

        writer.append(Group(1, "u", 1, 0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(OSError, match="no space left"):
                writer.commit()
        assert list(reader.groups()) == [0, 1]
        writer.append(Group(2, "a longer frame than the one that was taken back", 1, 0, 0))
        writer.commit()
        writer.append(Group(3, "v", 1, 0, 0))
        writer.commit()
        reader.refresh()
        assert list(reader.groups()) == [0, 1, 2, 3]


def test_a_reader_that_slept_through_several_seals_sees_all(tmp_path):
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        for group in range(3):
            begin(writer, group=group)
            finish(writer, group)
            writer.seal()
        assert not reader.executions()
        reader.refresh()
        assert sorted(reader.ends()) == [0, 1, 2]
        with pytest.raises(KeyError):
            reader.tree(3)


def test_a_rotation_opens_no_segment_and_a_question_only_the_one_that_answers_it(tmp_path, monkeypatch):
    opened = []
    file = h5py.File
    monkeypatch.setattr(trees.sealed.h5py, "File", lambda path, *how, **more: opened.append(Path(path).name) or file(path, *how, **more))
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        for number in range(4):
            begin(writer, group=number)
            writer.commit()
            finish(writer, number)
            writer.seal()
            opened.clear()
            reader.refresh()
            assert list(reader.executions()) == list(reader.ends()) == list(reader.groups()) == list(range(number + 1))
            assert number in reader.ends()
            assert len(reader.ends()) == number + 1
            assert not reader.live.executions
            assert opened == []
            assert reader.tree(number).execution.group == number
            assert opened == [f"segment-{number + 1:06d}.h5"]


def test_a_store_of_the_first_schema_is_read_and_goes_on(tmp_path):
    """Its header gave the number of segments only."""
    with StoreWriter(tmp_path, {"run": "old"}) as writer:
        for number in range(2):
            begin(writer, group=number)
            finish(writer, number)
            writer.seal()
        begin(writer, group=2)
    journal = tmp_path / "journal-000003.log"
    fd = os.open(journal, os.O_RDONLY)
    header, *payloads = Scan(fd).frames()
    os.close(fd)
    new = json.loads(header)
    old = {key: new[key] for key in ("generation", "next_node", "next_call", "next_execution", "provenance")}
    frames = [json.dumps({"schema": 1, "segments": 2, **old}).encode(), *payloads]
    journal.write_bytes(b"".join(frame(seq, payload) for seq, payload in enumerate(frames)))
    assert verify(tmp_path) == []
    with StoreReader(tmp_path) as reader:
        assert list(reader.executions()) == list(reader.groups()) == [0, 1, 2]
        assert list(reader.ends()) == [0, 1]
    with StoreWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="exists"):
            writer.append(Group(1, "t", 1, 0, 0))
        finish(writer, 2)
        assert [path.name for path in writer.seal()] == ["segment-000003.h5"]
    with StoreReader(tmp_path) as reader:
        assert list(reader.ends()) == [0, 1, 2]
        assert [entry.digest == "" for entry in reader.header.segments] == [True, True, False]
        assert reader.header.provenance == {"run": "old"}
    assert verify(tmp_path) == []


def test_damage_in_the_middle_of_the_journal_is_said_and_a_half_written_end_is_none(tmp_path):
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        begin(writer)
        writer.commit()
        reader.refresh()
        (journal,) = tmp_path.glob("journal-*")
        at = len(journal.read_bytes().rstrip(b"\0")) + 40
        for number in range(2):
            writer.context_node(-1, np.arange(100) + number, 0, -1, Role.MAIN)
            writer.commit()
            reader.check()  # a view that is behind is sound
    data = bytearray(journal.read_bytes())
    data[at] ^= 255
    journal.write_bytes(data)
    with StoreReader(tmp_path) as reader, pytest.raises(StoreError, match="a good frame follows"):
        reader.check()
    with pytest.raises(StoreError, match="is damaged at byte"):
        stats(tmp_path)
    journal.write_bytes(data[: at + 1])
    assert stats(tmp_path)["nodes"] == 0  # torn: nothing follows
