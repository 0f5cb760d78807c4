"""Damage to a store is found, and named."""

import shutil

import h5py
import numpy as np
import pytest

import trees.verify
from tests.trees.forests import Play, Turn
from trees.records import Fate, Group, Role
from trees.store import StoreWriter
from trees.verify import verify


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("good")
    play = Play(directory)
    rows = [Turn(e, a, 3, 4, Role.MAIN, Fate.DELIVERED, "") for e in range(3) for a in (0, 2, 3)]
    play.play([*rows, *(Turn(e, 0, 1, 1, Role.SUB_AGENT, Fate.DELIVERED, "end") for e in range(2))])
    play.writer.seal()
    play.play([Turn(0, 0, 1, 1, Role.MAIN, Fate.DELIVERED, "commit"), Turn(2, 0, 1, 1, Role.MAIN, Fate.DELIVERED, "commit")])
    play.writer.close()
    assert verify(directory) == []
    return directory


@pytest.fixture
def store(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


@pytest.mark.parametrize(
    ("dataset", "row", "value", "found"),
    [
        ("tokens", 0, 77, "does not have its hash"),
        ("tokens", 1, -3, "token ids below 0"),
        ("logprobs", -1, np.nan, "not finite or above 0"),
        ("logprobs", -1, 0.5, "not finite or above 0"),
        ("logprobs", 0, -0.5, "log-probs on context"),
        ("versions", -1, -1, "without a version"),
        ("nodes/parent", 1, 10**6, "parent is missing or later"),
        ("nodes/length", 0, 1, "do not cover"),
        ("nodes/offset", 0, 1, "do not cover"),
        ("nodes/kind", 0, 1, "does not continue the prompt"),
        ("nodes/role", 0, 9, "mean nothing"),
        ("nodes/call", 1, 5, "does not continue the prompt"),
        ("nodes/id", 0, 10**6, "do not ascend"),
        ("calls/prompt", 0, 10**6, "is not one of execution"),
        ("calls/sampled", 0, 0, "is not what it sampled"),
        ("calls/execution", 0, 77, "unknown execution"),
        ("calls/fate", 0, 9, "mean nothing"),
        ("executions/group", 0, 9, "is unknown"),
    ],
)
def test_a_wrong_value_is_found(store, dataset, row, value, found):
    segment = store / "segment-000001.h5"
    with h5py.File(segment, "r+") as file:
        file[dataset][row if row >= 0 else len(file[dataset]) - 1] = value
    problems = verify(store)
    assert any(found in problem for problem in problems), problems
    assert all(problem.startswith("segment-000001.h5: ") for problem in problems)


def test_rows_that_are_missing_are_found(store):
    with h5py.File(store / "segment-000001.h5", "r+") as file:
        file["logprobs"].resize(5, 0)
    assert "digest differs" in verify(store)[0]
    assert "5 rows" in verify(store)[1]


def test_a_flipped_byte_of_a_chunk_is_found_by_its_checksum(store):
    segment = store / "segment-000001.h5"
    with h5py.File(segment) as file:
        where = file["tokens"].id.get_chunk_info(0)
    data = bytearray(segment.read_bytes())
    data[where.byte_offset + where.size // 2] ^= 1
    segment.write_bytes(data)
    assert "digest differs" in verify(store)[0]
    assert "can't be read" in verify(store)[1]


def test_a_missing_segment_and_a_damaged_journal_are_found(store):
    (store / "segment-000001.h5").unlink()
    assert "segment-000001.h5 is missing" in verify(store)[0]
    assert "sealed executions that are in no segment: 0, 1" in verify(store)[-1]
    journal = store / "journal-000002.log"
    data = bytearray(journal.read_bytes())
    data[len(data) // 3] ^= 1
    journal.write_bytes(data)
    assert "a good frame follows" in verify(store)[0]


def test_an_uncommitted_tail_is_no_problem(store):
    journal = store / "journal-000002.log"
    journal.write_bytes(journal.read_bytes() + b"GYJ1torn")
    assert verify(store) == []


def test_commits_while_the_journal_is_read_are_no_damage(store, monkeypatch):
    look = trees.verify.damage_after
    with StoreWriter(store) as writer:
        moments = iter(range(3))

        def busy(fd, offset, seq):
            if next(moments, None) is not None:
                for _ in range(2):
                    writer.append(Group(50 + writer.allocate_call(), "t", 1, 0, 0))
                    writer.commit()
            return look(fd, offset, seq)

        monkeypatch.setattr(trees.verify, "damage_after", busy)
        assert verify(store) == []
        assert next(moments, None) is None
