"""What damage leaves is made usable again, and what is lost has a name."""

import errno
import json
import os
import shutil

import h5py
import numpy as np
import pytest

from tests.trees.forests import begin, finish, one_call
from tests.trees.test_merging import content, seal_one
from trees.errors import Damaged, StoreError
from trees.files import LOCK
from trees.journal import frame
from trees.records import Execution, Group, Role
from trees.repair import repair
from trees.store import StoreReader, StoreWriter
from trees.verify import verify

SEALED = 4


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Four segments (the last with two executions), and a journal with an execution that is over and one that lives."""
    directory = tmp_path_factory.mktemp("good")
    with StoreWriter(directory, {"run": "r"}) as writer:
        for group in range(SEALED - 1):
            seal_one(writer, group)
        begin(writer, group=3)
        writer.append(Execution(writer.allocate_execution(), 3, 1, 0))
        for execution in (3, 4):
            at = writer.context_node(-1, np.arange(5000) * (execution + 1), execution, -1, Role.MAIN)
            one_call(writer, execution, at, range(70_000))
            finish(writer, execution)
        writer.seal()
        begin(writer, group=5)
        one_call(writer, 5, writer.context_node(-1, list(range(100)), 5, -1, Role.MAIN))
        finish(writer, 5)
        writer.commit()
        begin(writer, group=6)
        writer.commit()
        one_call(writer, 6, writer.context_node(-1, [1, 2], 6, -1, Role.MAIN))
    return directory


@pytest.fixture
def store(good, tmp_path):
    return shutil.copytree(good, tmp_path / "run" / "trees")


def read(directory):
    with StoreReader(directory) as reader:
        return {execution: content(reader, execution) for execution in reader.executions()}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    return bytes(data)


def goes_on(directory):
    """The next writer takes it, and what it appends is there."""
    with StoreWriter(directory) as writer:
        execution = writer.allocate_execution()
        group = 50 + execution
        writer.append(Group(group, "t", 1, 0, 0))
        writer.append(Execution(execution, group, 0, 0))
        one_call(writer, execution, writer.context_node(-1, list(range(100)), execution, -1, Role.MAIN))
        finish(writer, execution)
        writer.seal()
    assert verify(directory) == []
    with StoreReader(directory) as reader:
        assert len(reader.tree(execution).nodes) == 2
    return execution


def test_a_store_without_damage_is_left_as_it_is_but_for_what_a_crash_left(store):
    before = read(store)
    files = {path.name: path.read_bytes() for path in store.iterdir()}
    assert repair(store.parent).done == []
    assert verify(store) == []
    (store / ".tmp-1-segment-000009.h5").write_bytes(b"half")
    (store / "segment-000009.h5").write_bytes(files["segment-000001.h5"])
    with (store / "journal-000005.log").open("ab") as journal:
        journal.write(frame(9, b"torn")[:-1])
    report = repair(store)
    assert report.done == [
        "an uncommitted tail of the journal was cut",
        ".tmp-1-segment-000009.h5 was left by a crash and is removed",
        "segment-000009.h5 was left by a crash and is removed",
    ]
    assert sorted(path.name for path in store.iterdir()) == sorted(files)
    assert read(store) == before
    goes_on(store)


def test_a_damaged_segment_is_set_aside_and_its_executions_are_told_one_by_one(store):
    before = read(store)
    victim = store / "segment-000004.h5"
    with h5py.File(victim) as file:
        # Nothing but tokens of execution 4.
        where = file["logprobs"].id.get_chunk_info(2)
    damaged = flip(victim, where.byte_offset + where.size // 2)
    assert "digest differs" in verify(store)[0]
    report = repair(store)
    assert (store / "damaged" / "segment-000004.h5").read_bytes() == damaged
    assert not victim.exists()
    assert report.lost == []
    assert report.heads == [4]
    assert "execution 4: its tree is lost, how it ended is kept" in report.done
    assert any(line.startswith("segment-000004.h5: ") for line in report.done)
    assert verify(store) == []
    after = read(store)
    assert after.keys() == before.keys()
    assert {e: after[e] for e in after if e != 4} == {e: before[e] for e in before if e != 4}
    begun, end, nodes, calls, _ = after[4]
    assert (begun, end.score, nodes, calls) == (before[4][0], before[4][1].score, [], [])
    assert end.detail == "its tree was lost with segment-000004.h5"
    assert repair(store).done == []
    goes_on(store)


@pytest.mark.parametrize("what", ["gone", "empty", "half", "noise"])
def test_a_segment_of_which_nothing_is_left_is_named_by_its_executions(store, what):
    before = read(store)
    victim = store / "segment-000004.h5"
    data = victim.read_bytes()
    victim.unlink()
    if what != "gone":
        victim.write_bytes({"empty": b"", "half": data[: len(data) // 2], "noise": bytes(range(256)) * 9}[what])
    with pytest.raises(StoreError, match="gyre trees repair"):
        StoreWriter(store)
    report = repair(store)
    assert report.lost == [3, 4]
    assert report.done[-2:] == ["execution 3 is lost", "execution 4 is lost"]
    assert (store / "damaged" / victim.name).exists() == (what != "gone")
    assert read(store) == {e: before[e] for e in before if e not in (3, 4)}
    with StoreReader(store) as reader:
        assert list(reader.lost) == [3, 4]
    assert verify(store) == []
    assert goes_on(store) == 7
    with StoreReader(store) as reader:
        assert list(reader.lost) == [3, 4]


def test_a_hole_in_the_journal_keeps_what_does_not_lean_on_it(store):
    before = read(store)
    journal = store / "journal-000005.log"
    data = journal.read_bytes()
    frames = [at for at in range(len(data)) if data[at : at + 4] == b"GYJ1"]
    damaged = flip(journal, frames[1] + 30)  # execution 5 from beginning to end
    with pytest.raises(StoreError, match="a good frame follows"):
        StoreWriter(store)
    report = repair(store)
    assert report.lost == [5]
    assert (store / "damaged" / journal.name).read_bytes() == damaged
    assert read(store) == {e: before[e] for e in before if e != 5}
    assert verify(store) == []
    assert goes_on(store) == 7


def test_a_file_system_without_hard_links_keeps_a_copy(store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    victim = store / "segment-000002.h5"
    damaged = flip(victim, 5000)
    real = os.link
    monkeypatch.setattr(os, "link", lambda a, b: real(a, b) if str(b).endswith(LOCK) else refuse())
    repair(store)
    assert (store / "damaged" / victim.name).read_bytes() == damaged
    assert not victim.exists()
    assert verify(store) == []


def test_a_hole_behind_a_rotation_keeps_the_trees_that_live_on(store):
    """A rotated journal has all nodes before the calls that sampled them."""
    with StoreWriter(store) as writer:
        at = one_call(writer, 6, writer.context_node(0, [8], 6, -1, Role.MAIN))
        one_call(writer, 6, writer.context_node(at, [9], 6, -1, Role.MAIN))
        writer.seal()
        begin(writer, group=7)
        writer.commit()
        begin(writer, group=8)
    before = read(store)
    journal = store / "journal-000006.log"
    data = journal.read_bytes()
    frames = [at for at in range(len(data)) if data[at : at + 4] == b"GYJ1"]
    flip(journal, frames[2] + 30)
    assert len(before[6][2]) >= 6
    report = repair(store)
    assert report.lost == [7]
    assert read(store) == {e: before[e] for e in before if e != 7}
    assert not any("dropped" in line for line in report.done)
    assert verify(store) == []
    assert goes_on(store) == 9


def test_a_journal_without_its_header_is_made_anew_from_the_segments_and_the_rest(store):
    before = read(store)
    journal = store / "journal-000005.log"
    flip(journal, 40)
    shutil.copy(store / "segment-000002.h5", store / "segment-000009.h5")
    (store / "segment-000008.h5").write_bytes(b"no segment")
    report = repair(store)
    assert report.lost == []
    assert read(store) == before
    assert {path.name for path in (store / "damaged").iterdir()} == {journal.name, "segment-000008.h5", "segment-000009.h5"}
    assert verify(store) == []
    assert goes_on(store) == 7


def test_segments_alone_are_a_store_again(store):
    before = read(store)
    (store / "journal-000005.log").unlink()
    for way in (lambda: StoreWriter(store), lambda: verify(store)):
        with pytest.raises(Damaged, match=r"holds segments and no journal; restore .*, or run gyre trees repair"):
            way()
    report = repair(store)
    assert read(store) == {e: before[e] for e in before if e < 5}
    assert "no journal" in report.done[0]
    assert verify(store) == []
    assert goes_on(store) == 5


def test_a_store_that_is_written_is_refused_and_one_that_is_none(store, tmp_path):
    with StoreWriter(store), pytest.raises(StoreError, match="is held by process"):
        repair(store)
    with pytest.raises(StoreError, match="holds no trajectory trees"):
        repair(tmp_path)


def test_what_another_version_wrote_is_not_damage(store):
    journal = store / "journal-000005.log"
    good = journal.read_bytes()
    for payload in (json.dumps({"schema": 99}).encode(), None):
        begin = frame(0, payload) if payload else good[: good.index(b"GYJ1", 4)]
        journal.write_bytes(begin + frame(1, b"\x01\0\0\0\x63"))
        before = {path: path.read_bytes() for path in store.iterdir()}
        with pytest.raises(StoreError, match="use the version of gyre-hpc that wrote it"):
            repair(store)
        assert {path: path.read_bytes() for path in store.iterdir()} == before


def test_damage_that_was_set_aside_before_has_another_name(store):
    for number in (4, 6):
        victim = next(path for path in store.glob("segment-*.h5") if int(path.stem[-6:]) == number) if number == 4 else None
        if victim is None:
            victim = store / "segment-000001.h5"
        (store / "damaged").mkdir(exist_ok=True)
        (store / "damaged" / victim.name).write_bytes(b"earlier")
        victim.write_bytes(b"")
        repair(store)
        assert (store / "damaged" / f"{victim.name}.1").read_bytes() == b""
        assert (store / "damaged" / victim.name).read_bytes() == b"earlier"


class Crash(BaseException):
    """The process ends here, as far as the store is concerned."""


def test_a_repair_that_is_killed_at_any_step_can_be_done_again(store, tmp_path, monkeypatch):
    before = read(store)
    flip(store / "journal-000005.log", 40)
    (store / "segment-000004.h5").write_bytes(b"")
    steps = 0

    def counted(call):
        def wrapped(path, *rest, **more):
            nonlocal steps
            if LOCK not in str(path):
                steps += 1
                if steps == last:
                    raise Crash
            return call(path, *rest, **more)

        return wrapped

    last = 0
    while True:
        last, steps = last + 1, 0
        copy = shutil.copytree(store, tmp_path / f"copy-{last}")
        with monkeypatch.context() as patch:
            for name in ("link", "rename", "unlink", "mkdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                repair(copy)
            except Crash:
                pass
            else:
                break
        repair(copy)
        assert verify(copy) == []
        assert read(copy) == {e: before[e] for e in before if e not in (3, 4)}
        kept = {path.read_bytes() for path in (copy / "damaged").iterdir()}
        assert {(store / "journal-000005.log").read_bytes(), b""} <= kept
        with StoreReader(copy) as reader:
            assert list(reader.lost) == [3, 4]
    assert last > 6
