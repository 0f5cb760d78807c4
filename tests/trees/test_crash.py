"""Real SIGKILLs, a full disk, and a reader beside a writer that seals."""

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from trees.catalogue import FAN
from trees.journal import AHEAD
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter
from trees.verify import verify

LOST = "lost:restart"
fork = multiprocessing.get_context("fork")


def tokens_of(execution, turn):
    return np.arange(turn + 2, dtype=np.int32) + 10 * execution


def one_execution(writer, turns, size=4, start=(1, 2, 3)):
    """An execution with all of its calls; what it holds follows from its id. Returns the id, not committed."""
    execution = writer.allocate_execution()
    if execution % size == 0:
        writer.append(Group(execution // size, "task", size, 0, 0))
    writer.append(Execution(execution, execution // size, execution % size, 0))
    at = writer.context_node(-1, start, execution, -1, Role.MAIN)
    for turn in range(turns):
        call = writer.allocate_call()
        prompt = writer.context_node(at, [turn, 7], execution, call, Role.MAIN)
        writer.append(Intent(call, execution, prompt, Role.MAIN, bytes(16)))
        at, tokens = writer.allocate_node(), tokens_of(execution, turn)
        columns = (tokens, np.full(len(tokens), -0.5), np.full(len(tokens), turn))
        writer.append(Node(at, prompt, execution, call, NodeKind.SAMPLED, Role.MAIN, *columns))
        writer.append(CallEnd(call, execution, at, Fate.DELIVERED, "stop", "clean"))
    writer.append(ExecutionEnd(execution, "done", 1.0, True, turns, 9, 0.1))
    return execution


def assert_whole(reader, execution, turns):
    tree = reader.tree(execution)
    sampled = [node for node in tree.nodes.values() if node.kind is NodeKind.SAMPLED]
    assert len(sampled) == turns
    assert not tree.incomplete
    for turn, node in enumerate(sampled):
        assert tree.tokens_of([node.node]).tolist() == tokens_of(execution, turn).tolist()


def write_for_ever(directory, acknowledged, threads):
    """As a gateway after a crash: what lived is over; then several threads record while another seals and merges."""
    writer = StoreWriter(directory)
    for execution in sorted(writer.forest.executions.keys() - writer.forest.ends.keys()):
        writer.append(ExecutionEnd(execution, LOST, 0.0, False, 0, 0, 0.0))
    one_at_a_time = threading.Lock()

    def say(what):
        with one_at_a_time:
            acknowledged.send(what)

    def record():
        while True:
            execution = one_execution(writer, turns=2, size=1)
            writer.commit()
            say(execution)
            time.sleep(0.005)

    for _ in range(threads):
        threading.Thread(target=record, daemon=True).start()
    while True:
        if writer.seal():
            say(-1)


def killed(directory, rng):
    """What a child acknowledged until it was killed: after so many seals, whatever the machine's speed, at any instant."""
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=write_for_ever, args=(directory, send, 3), daemon=True)
    child.start()
    send.close()
    seals, acknowledged = rng.integers(0, 4), [receive.recv()]
    while acknowledged.count(-1) < seals:
        acknowledged.append(receive.recv())
    time.sleep(float(rng.uniform(0, 0.03)))
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with contextlib.suppress(EOFError):
        while True:
            acknowledged.append(receive.recv())
    return acknowledged


def assert_true(reader, execution):
    """All of it if it ended by itself; else a beginning of it, and nothing else."""
    end = reader.ends().get(execution)
    if end is not None and end.reason != LOST:
        assert_whole(reader, execution, turns=2)
        return
    tree = reader.tree(execution)
    sampled = [node for node in tree.nodes.values() if node.kind is NodeKind.SAMPLED]
    for turn, node in enumerate(sampled):
        assert tree.tokens_of([node.node]).tolist() == tokens_of(execution, turn).tolist()
    delivered = [call for call in tree.calls.values() if call.fate is Fate.DELIVERED]
    assert [call.sampled for call in delivered] == [node.node for node in sampled][: len(delivered)]
    assert len(tree.calls) - len(delivered) <= 1


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=[pytest.mark.job, pytest.mark.timeout(1800)])])
def test_what_was_acknowledged_survives_sigkill_at_any_instant(tmp_path, kills):
    rng = np.random.default_rng(int(os.environ.get("GYRE_TEST_SEED", "0")))
    kept, seals, checked, most = set(), 0, set(), 0
    for _ in range(kills):
        acknowledged = killed(tmp_path, rng)
        kept |= {execution for execution in acknowledged if execution >= 0}
        seals += acknowledged.count(-1)
        most = max(most, sum(1 for _ in tmp_path.glob("*.h5")))
        with StoreReader(tmp_path) as reader:
            assert all(reader.ends()[execution].reason == "done" for execution in kept - checked)
            assert kept <= set(reader.ends())
            ids = list(reader.executions())
            assert len(ids) == len(set(ids)) == len(reader.executions())
            for execution in ids:
                if execution not in checked:
                    assert_true(reader, execution)
            checked.update(reader.ends())
    assert verify(tmp_path) == []
    assert seals > kills / 2
    assert len(kept) > kills
    # However often it was killed: few files, and the bytes of what is in them.
    with StoreWriter(tmp_path) as writer:
        for execution in sorted(writer.forest.executions.keys() - writer.forest.ends.keys()):
            writer.append(ExecutionEnd(execution, LOST, 0.0, False, 0, 0, 0.0))
        writer.seal()
    files = list(tmp_path.iterdir())
    assert most <= 3 * FAN
    assert all(path.suffix in (".h5", ".log") for path in files)
    assert sum(path.stat().st_size for path in files) < 2 * FAN * 30_000 + 300 * len(ids)
    with StoreReader(tmp_path) as reader:
        for execution in kept:
            assert_whole(reader, execution, turns=2)


def resume_and_die(directory, record):
    """Opens the store, records one execution if it is told to, seals, and is gone without a word."""
    writer = StoreWriter(directory)
    if record:
        one_execution(writer, turns=2, size=1)
        writer.commit()
        writer.seal()
    os._exit(0)


@pytest.mark.job
@pytest.mark.parametrize("record", [False, True], ids=["idle", "at-work"])
def test_fifty_resumes_are_bounded_in_size(tmp_path, record):
    """While one execution lives through all of them: its records are not written anew each time."""
    with StoreWriter(tmp_path) as writer:
        lives = writer.allocate_execution()
        writer.append(Group(lives, "task", 1, 0, 0))
        writer.append(Execution(lives, lives, 0, 0))
        node = writer.context_node(-1, np.arange(5000), lives, -1, Role.MAIN)
        writer.commit()
    for _ in range(50):
        child = fork.Process(target=resume_and_die, args=(tmp_path, record))
        child.start()
        child.join()
        assert child.exitcode == 0
    StoreWriter(tmp_path).close()
    files = list(tmp_path.iterdir())
    assert len(files) <= 2 * FAN
    assert sum(path.stat().st_size for path in files) < 5000 * 4 + 50 * (40 + 500 * record) + 30_000 * len(files)
    assert verify(tmp_path) == []
    with StoreReader(tmp_path) as reader:
        assert len(reader.ends()) == 50 * record
        assert reader.tree(lives).tokens_of([node]).tolist() == list(range(5000))
        for execution in reader.ends():
            assert_whole(reader, execution, turns=2)


def write_some(directory, count):
    with StoreWriter(directory) as writer:
        for i in range(count):
            one_execution(writer, turns=2)
            writer.commit()
            if i % 3 == 2:
                writer.seal()


def test_a_reader_beside_a_sealing_writer_misses_and_doubles_nothing(tmp_path):
    child = fork.Process(target=write_some, args=(tmp_path, 30), daemon=True)
    child.start()
    views, seen, switches = 0, 0, 0
    with StoreReader(tmp_path) as reader:
        alive = True
        while alive:
            alive = child.is_alive()
            generation = reader.header.generation if reader.header else 0
            reader.refresh()
            views += 1
            switches += bool(reader.header) and reader.header.generation != generation
            ids = sorted(reader.executions())
            assert ids == list(range(len(ids)))
            assert len(ids) >= seen
            assert len(reader.ends()) == len(ids)
            sealed = [execution for segment in reader.segments for execution in segment.execution_ids.tolist()]
            assert len(sealed) == len(set(sealed))
            assert not set(sealed) & set(reader.live.executions)
            for execution in ids[seen:]:
                assert_whole(reader, execution, turns=2)
            seen = len(ids)
            if reader.header and views % 10 == 0:
                assert verify(tmp_path) == []
    child.join()
    assert (child.exitcode, seen) == (0, 30)
    assert switches >= 3


def can_mount(where="/tmp"):
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", where], capture_output=True)
    return os.geteuid() == 0 and probe.returncode == 0


@contextlib.contextmanager
def tmpfs(directory):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextlib.contextmanager
def file_limit(directory):
    """No file over 90 kB: what a full disk is to somebody who can't mount one (EFBIG instead of ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(writer, kept):
    while len(kept) < 10_000:
        execution = one_execution(writer, turns=12)
        writer.commit()
        kept.append(execution)


DISKS = [file_limit, tmpfs] if can_mount() else [file_limit]


@pytest.mark.parametrize("disk", DISKS)
def test_a_full_disk_raises_acknowledges_nothing_half_and_leaves_the_writer_usable(tmp_path, disk):
    directory = tmp_path / "small"
    directory.mkdir()
    with disk(directory):
        ballast = directory / "ballast"
        ballast.write_bytes(bytes(50_000 if disk is file_limit else 850_000))
        writer = StoreWriter(directory)
        kept = []
        with pytest.raises(OSError, match=r"No space|too large") as failure:
            fill(writer, kept)
        assert failure.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert kept
        with StoreReader(directory) as reader:
            assert sorted(reader.ends()) == kept
        assert verify(directory) == []
        # A seal needs room too; that it fails leaves the store as it was.
        if disk is tmpfs:
            with pytest.raises(OSError, match="No space"):
                writer.seal()
            assert sorted(p.name for p in directory.iterdir()) == ["ballast", "journal-000001.log", "writer.lock"]
            ballast.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        # Room again: what was buffered is written, and the store goes on.
        writer.commit()
        kept += [kept[-1] + 1, one_execution(writer, turns=12)]
        writer.seal()
        writer.close()
        assert verify(directory) == []
        with StoreReader(directory) as reader:
            assert sorted(reader.ends()) == kept
            for execution in kept:
                assert_whole(reader, execution, turns=12)


@pytest.mark.skipif(not can_mount(), reason="needs a small disk of its own (root and mount)")
def test_a_disk_that_fills_while_segments_are_sealed_and_merged_loses_nothing(tmp_path):
    """Seals until the disk is full, then with a little more room, again and again: each failure leaves a whole store."""
    directory = tmp_path / "small"
    directory.mkdir()
    kept, failures, fewer = [], [], 0
    rng = np.random.default_rng(0)

    def grow(writer):
        kept.append(one_execution(writer, turns=3, size=1, start=rng.integers(0, 1 << 17, 4000)))
        writer.commit()
        before = sum(1 for _ in directory.glob("*.h5"))
        writer.seal()
        return sum(1 for _ in directory.glob("*.h5")) < before

    with tmpfs(directory):
        ballast = [directory / f"ballast-{n}" for n in range(3)]
        for path in ballast:
            path.write_bytes(bytes(200_000))
        writer = StoreWriter(directory)
        while ballast:
            try:
                fewer += grow(writer)
            except OSError as error:
                failures.append(error.errno)
                assert not list(directory.glob(".tmp-*"))
                with StoreReader(directory) as reader:
                    assert set(reader.ends()) >= set(kept[:-1])
                assert verify(directory) == []
                ballast.pop().unlink()
                writer.commit()
        writer.seal()
        writer.close()
        assert verify(directory) == []
        assert fewer > 0
        assert len(failures) >= 3
        assert set(failures) == {errno.ENOSPC}
        with StoreReader(directory) as reader:
            assert sorted(reader.ends()) == kept
            for execution in kept:
                assert_whole(reader, execution, turns=3)


def test_a_store_whose_journal_is_torn_at_any_byte_is_as_it_was_one_commit_before(tmp_path):
    with StoreWriter(tmp_path / "good") as writer:
        whole = [one_execution(writer, turns=1) for _ in range(2)]
        writer.commit()
        begin = (tmp_path / "good" / "journal-000001.log").stat().st_size - AHEAD
        last = one_execution(writer, turns=1)
        writer.commit()
        data = (tmp_path / "good" / "journal-000001.log").read_bytes()
    end = len(data.rstrip(b"\0"))
    assert 0 < begin < end
    directory = tmp_path / "torn"
    directory.mkdir()
    for cut in range(begin, end + 1, 7):
        for rest in (b"", bytes(99)):
            journal = directory / "journal-000001.log"
            journal.write_bytes(data[:cut] + rest)
            with StoreReader(directory) as reader:
                assert set(reader.ends()) in (set(whole), {*whole, last})
                assert (last in reader.ends()) == (data[:cut] + rest)[:end].startswith(data[:end])
            StoreWriter(directory).close()
            assert verify(directory) == []
            with StoreReader(directory) as reader:
                for execution in reader.ends():
                    assert_whole(reader, execution, turns=1)
            journal.unlink()
