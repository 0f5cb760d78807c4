"""What is in memory of sealed segments, and how an id finds its file."""

import gc
import tracemalloc

import pytest

from tests.trees.forests import finish, one_call
from tests.trees.test_merging import content, seal_one
from trees.errors import Damaged
from trees.records import Execution, Group, Role
from trees.shelf import OPEN
from trees.store import StoreReader, StoreWriter

COUNT = 12


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("many")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trees.catalogue.FAN", 1000)
        with StoreWriter(directory) as writer:
            for group in range(COUNT):
                seal_one(writer, group, turns=1)
    return directory


def held(reader):
    """Segments of which anything is in memory."""
    return [segment for segment in reader.segments if set(segment.__dict__) - {"path", "entry", "_file", "_near"} or segment._file]


def test_reading_everything_holds_a_few_segments_at_a_time(store):
    with StoreReader(store) as reader:
        assert len(reader.segments) == COUNT
        assert (len(reader.executions()), len(reader.ends()), len(reader.groups())) == (COUNT, COUNT, COUNT)
        assert held(reader) == []
        most = 0
        for execution in reader.executions():
            content(reader, execution)
            assert not reader.incomplete(execution)
            most = max(most, len(held(reader)))
        assert most == OPEN
        for begun, _ in reader.heads():
            assert begun.group == begun.execution
            assert len(held(reader)) <= OPEN + 1
        for group in reader.groups().values():
            assert group == Group(group.group, f"task {group.group}", 1, 0, 0)
            assert len(held(reader)) <= OPEN + 1
    assert held(reader) == []


def test_a_writers_memory_does_not_grow_with_what_is_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr("trees.store.REMEMBERED", 20)
    tracemalloc.start()
    try:
        held = []
        with StoreWriter(tmp_path) as writer:
            for round_ in range(3):
                for group in range(100 * round_, 100 * (round_ + 1)):
                    writer.append(Group(group, f"tasks/{group}", 1, 0, 0))
                    writer.append(Execution(writer.allocate_execution(), group, 0, 0))
                    one_call(writer, group, writer.context_node(-1, [1, 2, group], group, -1, Role.MAIN), tokens=range(40))
                    finish(writer, group)
                    if group % 25 == 24:
                        writer.seal()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        assert len(writer.forest.executions) == 0
    finally:
        tracemalloc.stop()
    assert held[2] - held[0] < 200 * 100, "200 more executions, each of which takes thousands of bytes before it is sealed"


def test_mappings_answer_as_dictionaries_do(store):
    with StoreReader(store) as reader:
        for mapping in (reader.executions(), reader.ends(), reader.groups()):
            as_dict = dict(mapping)
            assert list(mapping) == list(as_dict) == list(range(COUNT))
            assert list(mapping.items()) == list(as_dict.items())
            assert list(mapping.values()) == list(as_dict.values())
            assert mapping == as_dict
            assert mapping.get(COUNT) is None
            assert -1 not in mapping
            assert "x" not in mapping
            with pytest.raises(KeyError):
                mapping[COUNT]


def test_what_the_catalogue_promises_and_no_segment_has_is_damage(store):
    with StoreReader(store) as reader:
        reader._shelf.executions.add(COUNT)
        reader._shelf.groups.add(COUNT)
        for ask in (lambda: reader.tree(COUNT), lambda: reader.groups()[COUNT]):
            with pytest.raises(Damaged, match="is in none of the segments"):
                ask()
