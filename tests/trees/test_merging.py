"""Many seals end in few files, and nobody notices: not by a value, not while reading."""

import logging
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trees.binding
import trees.catalogue
from tests.trees.forests import Play, begin, finish, forests, one_call
from tests.trees.test_store import assert_reads_as
from trees.catalogue import FAN
from trees.errors import Damaged
from trees.records import Execution, Group, Role
from trees.stats import stats
from trees.store import StoreReader, StoreWriter
from trees.verify import verify


def seal_one(writer, group, turns=2):
    """A group of one execution below a prefix that all share."""
    writer.append(Group(group, f"task {group}", 1, 0, 0))
    execution = writer.allocate_execution()
    writer.append(Execution(execution, group, 0, 0))
    at = writer.context_node(-1, list(range(100)), execution, -1, Role.MAIN)
    for turn in range(turns):
        at = one_call(writer, execution, writer.context_node(at, [execution, turn], execution, -1, Role.MAIN), (execution, turn, 7))
    finish(writer, execution)
    return writer.seal()


def content(reader, execution):
    tree = reader.tree(execution)
    columns = [column.tobytes() for column in (tree.columns.tokens, tree.columns.logprobs, tree.columns.versions)]
    return tree.execution, tree.end, list(tree.nodes.values()), list(tree.calls.values()), columns


def files(directory):
    return sorted(path.name for path in directory.glob("segment-*.h5"))


def test_segments_become_one_and_every_tree_reads_as_before(tmp_path):
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as old:
        for group in range(FAN - 1):
            seal_one(writer, group)
        old.refresh()
        before = {execution: content(old, execution) for execution in old.executions()}
        hashes = {}
        for segment in old.segments:
            hashes |= dict(zip(segment.column("nodes/id").tolist(), map(bytes, segment.column("nodes/hash")), strict=True))
        groups = dict(old.groups())
        assert len(files(tmp_path)) == FAN - 1
        assert [path.name for path in seal_one(writer, FAN - 1)] == [f"segment-{FAN + 1:06d}.h5"]
        assert files(tmp_path) == [f"segment-{FAN + 1:06d}.h5"]
        with StoreReader(tmp_path) as new:
            (segment,) = new.segments
            assert {e: content(new, e) for e in before} == before
            assert {group: new.groups()[group] for group in groups} == groups
            ids = segment.column("nodes/id").tolist()
            assert len(ids) == len(set(ids)) == 1 + 4 * FAN
            assert hashes.items() <= dict(zip(ids, map(bytes, segment.column("nodes/hash")), strict=True)).items()
            assert segment.rows("tokens") == 100 + FAN * 2 * 5
    assert verify(tmp_path) == []
    measured = stats(tmp_path)
    assert (measured["segments"], measured["stored_tokens"], measured["nodes"]) == (1, 100 + FAN * 10, 1 + 4 * FAN)


def test_a_reader_of_segments_that_are_gone_goes_on(tmp_path):
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as open_before, StoreReader(tmp_path) as never_opened:
        for group in range(FAN - 1):
            seal_one(writer, group)
        open_before.refresh()
        never_opened.refresh()
        heads = open_before.heads()
        listed = [next(heads)]
        kept = content(open_before, 1)
        seal_one(writer, FAN - 1)
        assert content(open_before, 1) == content(never_opened, 1) == kept
        assert [begun.execution for begun, _ in [*listed, *heads]] in (list(range(FAN - 1)), list(range(FAN)))
        assert sorted(never_opened.ends()) == list(range(FAN))
        for path in tmp_path.glob("*.h5"):
            path.unlink()
        with pytest.raises(Damaged, match="is missing"), StoreReader(tmp_path) as reader:
            reader.tree(0)


def test_a_handle_that_went_stale_is_a_segment_that_was_merged_away(tmp_path, monkeypatch):
    with StoreWriter(tmp_path) as writer, StoreReader(tmp_path) as reader:
        for group in range(FAN - 1):
            seal_one(writer, group)
        reader.refresh()
        want = content(reader, 1)
        seal_one(writer, FAN - 1)
        read, gone = h5py.Dataset.__getitem__, []

        def stale(dataset, part):
            if not Path(dataset.file.filename).exists():
                gone.append(dataset.name)
                raise OSError(116, "stale file handle")
            return read(dataset, part)

        with monkeypatch.context() as patch:
            patch.setattr(h5py.Dataset, "__getitem__", stale)
            assert content(reader, 1) == want
        assert gone


@given(forests, st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_merging_at_every_second_seal_changes_nothing(tmp_path_factory, turns, seed):
    directory = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees.catalogue, "FAN", 2)
        play = Play(directory, seed)
        with StoreReader(directory) as follower, StoreReader(directory) as sleeper:
            for turn in turns:
                play.play([turn])
                play.writer.commit()
                follower.refresh()
                assert {begun.execution for begun, _ in sleeper.heads()} <= set(play.model.of)
        play.writer.close()
    with StoreReader(directory) as reader:
        assert_reads_as(reader, play.model)
        assert [head[0].execution for head in reader.heads()] == sorted(play.model.of)
        assert [group.group for group in reader.all_groups()] == [0, 1]
    assert verify(directory) == []
    assert stats(directory)["stored_tokens"] == sum(len(node.tokens) for node in play.model.nodes.values())


def test_a_damaged_segment_is_not_merged_and_the_others_are(tmp_path, caplog):
    with StoreWriter(tmp_path) as writer:
        for group in range(FAN - 1):
            seal_one(writer, group)
        victim = tmp_path / "segment-000003.h5"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            seal_one(writer, FAN - 1)
        assert "segment-000003.h5 has other bytes than were written" in caplog.text
        assert len(files(tmp_path)) == FAN
        seal_one(writer, FAN)
        assert files(tmp_path) == ["segment-000003.h5", f"segment-{FAN + 2:06d}.h5"]
    assert "segment-000003.h5: " in verify(tmp_path)[0]
    assert not any(f"segment-{FAN + 2:06d}.h5" in problem for problem in verify(tmp_path))


def test_a_merge_without_room_is_put_off_and_the_seal_is_not(tmp_path, monkeypatch, caplog):
    def full(segments):
        raise OSError(28, "no space left")

    with StoreWriter(tmp_path) as writer:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(trees.binding, "merged", full)
            for group in range(FAN + 1):
                assert len(seal_one(writer, group)) == 1
        assert "are not merged now: [Errno 28] no space left" in caplog.text
        assert len(files(tmp_path)) == FAN + 1
        seal_one(writer, FAN + 1)
        assert len(files(tmp_path)) == 3
    assert verify(tmp_path) == []


def test_a_prefix_and_a_group_in_a_merged_segment_are_found_again(tmp_path):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        root = writer.context_node(-1, np.arange(9), 0, -1, Role.MAIN)
        one_call(writer, 0, root)
        finish(writer, 0)
        writer.seal()
        for group in range(1, FAN):
            seal_one(writer, group)
        assert len(files(tmp_path)) == 1
        again = writer.allocate_execution()
        writer.append(Execution(again, 0, 1, 1))
        one_call(writer, again, root)
        finish(writer, again)
        writer.seal()
        with StoreReader(tmp_path) as reader:
            assert next(iter(reader.tree(again).nodes)) == root
    assert verify(tmp_path) == []
