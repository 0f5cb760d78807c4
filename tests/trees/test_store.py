import errno
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trees.binding
import trees.store
from tests.trees.forests import Play, begin, finish, forests, one_call
from trees.errors import StoreError
from trees.files import LOCK
from trees.journal import Draft, JournalWriter
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.segment import write_segment
from trees.stats import stats
from trees.store import StoreReader, StoreWriter
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


def nodes_of(reader):
    """Every node of the store with all that it says; nodes that several executions share must say the same in each."""
    found = {}
    for execution in reader.executions():
        tree = reader.tree(execution)
        for node, row in tree.nodes.items():
            columns = [column[tree.column_slices([node])[0]].tobytes() for column in vars(tree.columns).values()]
            assert found.setdefault(node, (row.parent, row.kind, row.role, row.call, row.execution, *columns))[5:] == tuple(columns)
    return found


@given(forests, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_was_written_is_read_through_seals_and_reopenings(tmp_path_factory, turns, seed):
    directory = tmp_path_factory.mktemp("store")
    play = Play(directory, seed)
    seen: dict[int, tuple[object, ...]] = {}
    with StoreReader(directory) as follower:
        for turn in turns:
            play.play([turn])
            play.writer.commit()
            follower.refresh()
            assert_reads_as(follower, play.model)
            now = nodes_of(follower)
            assert {node: now[node] for node in seen} == seen
            seen = now
        play.writer.close()
        follower.refresh()
        assert_reads_as(follower, play.model)
    with StoreReader(directory) as reader:
        assert_reads_as(reader, play.model)
    assert verify(directory) == []
    assert stats(directory)["stored_tokens"] == sum(len(node.tokens) for node in play.model.nodes.values())


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


def test_threads_append_commit_and_seal_together(tmp_path):
    """Appends and commits of several threads while another seals: all of it is there, once."""
    count, threads, sealed = 12, 3, Event()
    with StoreWriter(tmp_path) as writer:
        writer.append(Group(0, "t", count * threads, 0, 0))

        def work(thread):
            for i in range(count):
                if i == count // 2:
                    assert sealed.wait(60)
                execution = writer.allocate_execution()
                writer.append(Execution(execution, 0, thread * count + i, 0))
                one_call(writer, execution, writer.context_node(-1, [1, 2, thread], execution, -1, Role.MAIN))
                writer.commit()
                finish(writer, execution)

        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work, thread) for thread in range(threads)]
            while not all(future.done() for future in running):
                if writer.seal():
                    sealed.set()
            for future in running:
                future.result()
        writer.seal()
    with StoreReader(tmp_path) as reader:
        assert sorted(reader.ends()) == list(range(count * threads))
        assert {len(reader.tree(execution).nodes) for execution in reader.ends()} == {2}
        assert len(reader.segments) > 1
    assert verify(tmp_path) == []


@pytest.mark.parametrize("step", ["write", "finish"])
def test_appends_while_a_seal_writes_its_journal_lean_on_what_it_sealed(tmp_path, monkeypatch, step):
    """The moments at which a sealed prefix leaves memory: whatever is appended then must find it in the journal again."""
    original = getattr(Draft, step)
    with StoreWriter(tmp_path) as writer:
        writer.append(Group(0, "t", 9, 0, 0))
        first = writer.allocate_execution()
        writer.append(Execution(first, 0, 0, 0))
        root = writer.context_node(-1, [1, 2], first, -1, Role.MAIN)
        one_call(writer, first, root)
        finish(writer, first)
        second = writer.allocate_execution()

        def busy(draft, *payloads):
            monkeypatch.setattr(Draft, step, original)
            writer.append(Execution(second, 0, 1, 0))
            assert writer.context_node(-1, [1, 2], second, -1, Role.MAIN) == root
            one_call(writer, second, root)
            return original(draft, *payloads)

        monkeypatch.setattr(Draft, step, busy)
        writer.seal()
        writer.commit()
        with StoreReader(tmp_path) as reader:
            assert (len(reader.segments), list(reader.live.executions)) == (1, [second])
            assert next(iter(reader.tree(second).nodes)) == root
        finish(writer, second)
        writer.seal()
    assert verify(tmp_path) == []
    assert stats(tmp_path)["nodes"] == 3


@pytest.mark.parametrize("step", ["write", "finish"])
def test_a_seal_that_fails_while_others_append_loses_nothing(tmp_path, monkeypatch, step):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        finish(writer, 0)
        writer.commit()

        def full(draft, *payloads):
            finish(writer, 1)
            draft.drop()
            raise OSError(28, "no space left")

        def slow(*segment):
            begin(writer, group=1)
            return write_segment(*segment)

        with monkeypatch.context() as patch:
            patch.setattr(trees.binding, "write_segment", slow)
            patch.setattr(Draft, step, full)
            with pytest.raises(OSError, match="no space left"):
                writer.seal()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-000001.log", "writer.lock"]
    with StoreReader(tmp_path) as reader:
        assert sorted(reader.ends()) == [0, 1]
    with StoreWriter(tmp_path) as writer:
        assert len(writer.seal()) == 1
    with StoreReader(tmp_path) as reader:
        assert sorted(reader.ends()) == [0, 1]
    assert verify(tmp_path) == []


@pytest.mark.parametrize("what", ["sync_directory", "close", "interrupt"])
def test_a_seal_that_fails_once_its_journal_counts_keeps_its_segments(tmp_path, monkeypatch, caplog, what):
    def fail(*_):
        raise KeyboardInterrupt if what == "interrupt" else OSError(errno.EIO, "the disk")

    writer = StoreWriter(tmp_path)
    begin(writer)
    one_call(writer, 0, writer.context_node(-1, [1, 2], 0, -1, Role.MAIN))
    finish(writer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(*((JournalWriter, "close") if what == "close" else (trees.store, "sync_directory")), fail)
        if what == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                writer.seal()
        else:
            assert [path.name for path in writer.seal()] == ["segment-000001.h5"]
            assert "stays in" in caplog.text
    begin(writer, 1, 1)
    writer.close()
    assert verify(tmp_path) == []
    with StoreWriter(tmp_path), StoreReader(tmp_path) as reader:
        assert [len(reader.tree(execution).nodes) for execution in reader.executions()] == [2, 0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_writer_that_was_taken_over_touches_no_segment_of_the_next(tmp_path):
    old = StoreWriter(tmp_path)
    for execution in range(2):
        begin(old, execution, execution)
        one_call(old, execution, old.context_node(-1, [1, 2], execution, -1, Role.MAIN))
    finish(old, 0)
    old.commit()
    (tmp_path / LOCK).unlink()  # as `take_over` does for a holder on another host
    with StoreWriter(tmp_path) as new:
        finish(new, 1)
        assert [path.name for path in new.seal()] == ["segment-000001.h5"]
        with pytest.raises(StoreError, match="taken by another writer"):
            old.seal()
        assert verify(tmp_path) == []
    begin(old, 2, 2)
    with pytest.raises(StoreError, match="taken by another writer"):
        old.commit()
    assert verify(tmp_path) == []


def test_large_commits_and_seals_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(trees.store, "FRAME_LIMIT", 100)
    monkeypatch.setattr(trees.store, "SEGMENT_TOKENS", 5)
    with StoreWriter(tmp_path) as writer:
        writer.append(Group(0, "t", 9, 0, 0))
        for index in range(4):
            execution = writer.allocate_execution()
            writer.append(Execution(execution, 0, index, 0))
            one_call(writer, execution, writer.context_node(-1, [1], execution, -1, Role.MAIN))
            if index != 2:
                finish(writer, execution)
        assert len(writer.seal()) == 2
    with StoreReader(tmp_path) as reader:
        assert [segment.execution_ids.tolist() for segment in reader.segments] == [[0, 1], [3]]
        assert list(reader.live.executions) == [2]
        assert [len(reader.tree(execution).nodes) for execution in range(4)] == [2] * 4
    assert verify(tmp_path) == []


def test_details_are_cut_and_names_are_not(tmp_path):
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        with pytest.raises(ValueError, match="reason is at most"):
            writer.append(ExecutionEnd(0, "x" * 5000, 0.0, False, 0, 0, 0.0))
        writer.append(ExecutionEnd(0, "crash", 0.0, False, 0, 0, 0.0, "é\0" * 1000))
        writer.commit()
        with StoreReader(tmp_path) as reader:
            detail = reader.ends()[0].detail
            assert detail == ("é " * 1000)[: len(detail)]
            assert 990 <= len(detail.encode()) <= 1000
            writer.seal()
            reader.refresh()
            assert reader.ends()[0].detail == detail.rstrip("\0")
