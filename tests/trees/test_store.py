import json
import os
import subprocess

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trees.reader
from tests.trees.forests import Play, forests
from trees.files import WriterLock
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.stats import stats
from trees.store import StoreError, StoreReader, StoreWriter
from trees.verify import verify


def assert_reads_as(reader, model):
    assert sorted(reader.executions()) == sorted(model.of)
    assert dict(reader.ends()) == model.ends
    for execution, nodes in model.of.items():
        tree = reader.tree(execution)
        assert set(tree.nodes) == nodes
        for node in nodes:
            want, got = model.nodes[node], tree.nodes[node]
            assert (got.parent, got.kind, got.length) == (want.parent, want.kind, len(want.tokens))
            part = tree.column_slices([node])[0]
            assert np.array_equal(tree.columns.tokens[part], want.tokens)
            if want.kind is NodeKind.SAMPLED:
                assert (got.execution, got.call, got.role) == (want.execution, want.call, want.role)
                assert np.array_equal(tree.columns.logprobs[part], want.logprobs)
                assert np.array_equal(tree.columns.versions[part], want.versions)
        want_calls = {call: both for call, both in model.calls.items() if both[0].execution == execution}
        assert set(tree.calls) == set(want_calls)
        for call, (intent, end) in want_calls.items():
            got_call = tree.calls[call]
            assert (got_call.prompt, got_call.role, got_call.digest) == (intent.prompt, intent.role, intent.digest)
            assert (got_call.fate, got_call.sampled) == ((None, -1) if end is None else (end.fate, end.sampled))
        assert tree.incomplete == reader.incomplete(execution) == any(end is None for _, end in want_calls.values())
        skeleton = reader.tree(execution, tokens=False)
        assert [(n.node, n.parent, n.length) for n in skeleton.nodes.values()] == [
            (n.node, n.parent, n.length) for n in tree.nodes.values()
        ]


@given(forests, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_was_written_is_read_through_seals_and_reopenings(tmp_path_factory, turns, seed):
    directory = tmp_path_factory.mktemp("store")
    play = Play(directory, seed)
    with StoreReader(directory) as follower:
        for turn in turns:
            before = {node: (n.parent, n.tokens.tolist()) for node, n in play.model.nodes.items()}
            play.play([turn])
            assert before == {node: (play.model.nodes[node].parent, play.model.nodes[node].tokens.tolist()) for node in before}
            play.writer.commit()
            follower.refresh()
            assert_reads_as(follower, play.model)
        play.writer.close()
        follower.refresh()
        assert_reads_as(follower, play.model)
    with StoreReader(directory) as reader:
        assert_reads_as(reader, play.model)
    assert verify(directory) == []
    assert stats(directory)["stored_tokens"] == sum(len(node.tokens) for node in play.model.nodes.values())


def begin(writer, execution=0, group=0):
    writer.append(Group(group, "t", 2, 0, 0))
    writer.append(Execution(writer.allocate_execution(), group, 0, 0))


def one_call(writer, execution, prompt, tokens=(1, 2)):
    call, node, n = writer.allocate_call(), writer.allocate_node(), len(tokens)
    writer.append(Intent(call, execution, prompt, Role.MAIN, bytes(16)))
    writer.append(Node(node, prompt, execution, call, NodeKind.SAMPLED, Role.MAIN, np.array(tokens), -np.ones(n), np.zeros(n)))
    writer.append(CallEnd(call, execution, node, Fate.DELIVERED, "stop", "clean"))
    return node


def finish(writer, execution):
    writer.append(ExecutionEnd(execution, "done", 1.0, True, 1, 2, 0.5))


def test_context_is_shared_across_executions_and_sampled_tokens_never(tmp_path):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        second = writer.allocate_execution()
        writer.append(Execution(second, 0, 1, 0))
        root = writer.context_node(-1, [5, 6, 7], 0, -1, Role.MAIN)
        assert writer.context_node(-1, [5, 6, 7], second, -1, Role.MAIN) == root
        assert writer.context_node(-1, [5, 6], second, -1, Role.MAIN) != root
        sampled = one_call(writer, 0, root)
        twin = one_call(writer, 0, root)
        assert writer.context_node(sampled, [9], 0, -1, Role.MAIN) != writer.context_node(twin, [9], 0, -1, Role.MAIN)
        with pytest.raises(ValueError, match="sampled by execution 0"):
            writer.context_node(sampled, [9], second, -1, Role.MAIN)


def test_a_sealed_prefix_keeps_its_id_and_its_group(tmp_path):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        root = writer.context_node(-1, [1, 2], 0, -1, Role.MAIN)
        leaf = writer.context_node(root, [3], 0, -1, Role.MAIN)
        one_call(writer, 0, leaf)
        finish(writer, 0)
        assert len(writer.seal()) == 1
        again = writer.allocate_execution()
        writer.append(Execution(again, 0, 0, 1))
        one_call(writer, again, leaf)
        finish(writer, again)
        assert [path.name for path in writer.seal()] == ["segment-000002.h5"]
        with pytest.raises(ValueError, match="unknown or sealed"):
            finish(writer, again)
        with StoreReader(tmp_path) as reader:
            assert list(reader.tree(again).nodes)[:2] == [root, leaf]
    assert verify(tmp_path) == []
    assert stats(tmp_path)["stored_tokens"] == 3 + 4


def test_an_execution_with_a_call_in_flight_is_not_sealed_before_the_call_ends(tmp_path):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        prompt = writer.context_node(-1, [1], 0, -1, Role.MAIN)
        call = writer.allocate_call()
        writer.append(Intent(call, 0, prompt, Role.MAIN, bytes(16)))
        finish(writer, 0)
        assert writer.seal() == []
        writer.append(CallEnd(call, 0, -1, Fate.CANCELLED, "cancelled", "clean"))
        assert len(writer.seal()) == 1


def test_calls_that_a_crash_abandoned_do_not_hold_a_seal_back_and_stay_visible(tmp_path):
    writer = StoreWriter(tmp_path)
    begin(writer)
    writer.append(Intent(writer.allocate_call(), 0, writer.context_node(-1, [1], 0, -1, Role.MAIN), Role.MAIN, bytes(16)))
    writer.close()
    with StoreWriter(tmp_path) as writer:
        finish(writer, 0)
        assert len(writer.seal()) == 1
    with StoreReader(tmp_path) as reader:
        assert reader.incomplete(0)
        assert stats(tmp_path)["incomplete"] == 1


def test_ids_are_not_used_again_after_recovery(tmp_path):
    for _ in range(3):
        with StoreWriter(tmp_path) as writer:
            execution, node, call = writer.allocate_execution(), writer.allocate_node(), writer.allocate_call()
            if execution == 0:
                writer.append(Group(0, "t", 9, 0, 0))
            writer.append(Execution(execution, 0, execution, 0))
            writer.append(Node(node, -1, execution, -1, NodeKind.CONTEXT, Role.MAIN, np.array([execution])))
            writer.append(Intent(call, execution, node, Role.MAIN, bytes(16)))
            writer.append(CallEnd(call, execution, -1, Fate.BROKEN, "fault", "clean"))
            finish(writer, execution)
            writer.seal()
    assert (execution, node, call) == (2, 2, 2)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Group(0, "t", 1, 0, 0), "exists"),
        (Execution(0, 0, 0, 0), "exists"),
        (Execution(7, 3, 0, 0), "unknown group"),
        (Execution(7, 0, 2, 0), "outside its group"),
        (Node(9, 8, 0, -1, NodeKind.CONTEXT, Role.MAIN, np.array([1])), "unknown"),
        (Node(0, -1, 0, -1, NodeKind.CONTEXT, Role.MAIN, np.array([1])), "never change"),
        (Node(9, 0, 0, 0, NodeKind.SAMPLED, Role.MAIN, np.array([1]), np.array([-1.0]), np.array([0])), "has no call"),
        (Node(9, -1, 0, -1, NodeKind.CONTEXT, Role.MAIN, np.array([], np.int32)), "at least one token"),
        (Intent(0, 0, 5, Role.MAIN, bytes(16)), "unknown"),
        (Intent(0, 0, 0, Role.MAIN, b"short"), "16 bytes"),
        (CallEnd(4, 0, -1, Fate.DELIVERED, "stop", "clean"), "has no call"),
        (ExecutionEnd(3, "done", 0.0, True, 0, 0, 0.0), "unknown or sealed"),
    ],
)
def test_a_record_that_breaks_an_invariant_is_refused_and_changes_nothing(tmp_path, record, reason):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        writer.context_node(-1, [1], 0, -1, Role.MAIN)
        writer.commit()
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        with pytest.raises(ValueError, match=reason):
            writer.append(record)
        writer.commit()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size


def test_one_writer_at_a_time_and_a_stale_lock_is_taken_over(tmp_path):
    with StoreWriter(tmp_path) as first:
        with pytest.raises(StoreError, match=f"held by process {os.getpid()}"):
            StoreWriter(tmp_path)
        usurper = WriterLock(tmp_path / "writer.lock", take_over=True)
        first.append(Group(0, "t", 1, 0, 0))
        with pytest.raises(StoreError, match="taken by another writer"):
            first.commit()
        usurper.release()
        with pytest.raises(StoreError, match="taken by another writer"):
            first.close()
    child = os.fork()
    if child == 0:
        StoreWriter(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "writer.lock").exists()
    StoreWriter(tmp_path).close()
    assert not (tmp_path / "writer.lock").exists()
    (tmp_path / "writer.lock").write_text(json.dumps({"host": "elsewhere", "boot": "", "pid": 1, "start": "1"}))
    with pytest.raises(StoreError, match="on elsewhere"):
        StoreWriter(tmp_path)
    StoreWriter(tmp_path, take_over=True).close()


def test_debris_of_a_seal_that_did_not_finish_is_ignored_and_removed(tmp_path):
    writer = StoreWriter(tmp_path)
    begin(writer)
    finish(writer, 0)
    writer.commit()
    old = (tmp_path / "journal-000001.log").read_bytes()
    writer.seal()
    writer.close()
    # Before the journal was renamed: a segment that no journal counts.
    (tmp_path / "journal-000002.log").unlink()
    (tmp_path / "journal-000001.log").write_bytes(old)
    (tmp_path / ".tmp-1-segment-000002.h5").write_bytes(b"half")
    with StoreReader(tmp_path) as reader:
        assert not reader.segments
        assert list(reader.ends()) == [0]
    StoreWriter(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-000001.log"]
    with StoreWriter(tmp_path) as writer:
        writer.seal()
    # After it: the journal before.
    (tmp_path / "journal-000001.log").write_bytes(old)
    with StoreReader(tmp_path) as reader:
        assert (len(reader.segments), list(reader.ends())) == (1, [0])
    StoreWriter(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-000002.log", "segment-000001.h5"]


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


def test_a_segment_explains_itself_to_plain_tools(tmp_path):
    with StoreWriter(tmp_path, {"revision": "abc"}) as writer:
        begin(writer)
        one_call(writer, 0, writer.context_node(-1, [1, 2, 3], 0, -1, Role.MAIN))
        finish(writer, 0)
        (segment,) = writer.seal()
    header = subprocess.run(["h5dump", "-H", segment], capture_output=True, text=True, check=True).stdout
    for word in ("COMMENT", "behaviour log-probability in nats", "SAMPLED", "SUPERSEDED", "rows_nodes", "provenance"):
        assert word in header
    values = subprocess.run(["h5dump", "-d", "/tokens", segment], capture_output=True, text=True, check=True).stdout
    assert "(0): 1, 2, 3, 1, 2" in values
    with h5py.File(segment) as file:
        assert json.loads(file.attrs["provenance"]) == {"revision": "abc"}
        assert file.attrs["rows_tokens"] == 5
        datasets = []
        file.visititems(lambda name, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
        for dataset in datasets:
            assert dataset.fletcher32
            assert dataset.shuffle
            assert dataset.compression == "gzip"
            assert dataset.chunks
            assert dataset.attrs["description"]


def test_a_missing_store_is_an_empty_view_until_it_comes(tmp_path):
    with StoreReader(tmp_path / "trees") as reader:
        assert not reader.groups()
        with StoreWriter(tmp_path / "trees") as writer:
            begin(writer)
        reader.refresh()
        assert list(reader.groups()) == [0]
    with pytest.raises(StoreError, match="holds no trajectory trees"):
        stats(tmp_path / "nothing")
