"""A system call that fails, at every step of a seal that merges: what was and what is acknowledged stays."""

import contextlib
import errno
import itertools
import os
import shutil

import pytest

import trees.catalogue
from tests.trees.forests import begin, finish, one_call
from tests.trees.test_merging import content, seal_one
from trees.errors import StoreError
from trees.records import Role
from trees.store import StoreReader, StoreWriter
from trees.verify import verify

CALLS = ("open", "rename", "fsync", "fdatasync", "unlink", "pwrite", "ftruncate", "close")
FILES = 3


class Faults:
    """Fails call number `at` of these within `here`, and those behind it if it is `lasting`. A failed close has closed."""

    def __init__(self, monkeypatch, at, lasting):
        self.count, self.at, self.lasting, self.armed = 0, at, lasting, False
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, call):
        def counted(*given, **named):
            self.count += self.armed
            if self.armed and (self.count == self.at or (self.lasting and self.count > self.at)):
                if name == "close":
                    call(*given)
                raise OSError(errno.EIO, f"injected into {name}")
            return call(*given, **named)

        return counted

    @contextlib.contextmanager
    def here(self):
        self.armed = True
        try:
            yield
        finally:
            self.armed = False


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """As many segments as there may be but for one, a sealed prefix in use, an execution that is over and one that lives."""
    directory = tmp_path_factory.mktemp("made")
    with StoreWriter(directory) as writer:
        for group in range(FILES - 1):
            seal_one(writer, group)
        for execution in (FILES - 1, FILES):
            begin(writer, execution, group=execution)
            one_call(writer, execution, writer.context_node(0, [execution], execution, -1, Role.MAIN))
        finish(writer, FILES - 1)
    return directory


def read(directory):
    with StoreReader(directory) as reader:
        return {execution: content(reader, execution) for execution in reader.executions()}


@pytest.mark.parametrize("lasting", [False, True])
def test_a_seal_that_fails_at_any_step_loses_nothing(made, tmp_path, monkeypatch, lasting):
    monkeypatch.setattr(trees.catalogue, "FAN", FILES)
    before, merged = read(made), 0
    for at in itertools.count(1):
        store = shutil.copytree(made, tmp_path / str(at))
        writer = StoreWriter(store)
        with monkeypatch.context() as patch:
            faults = Faults(patch, at, lasting)
            with contextlib.suppress(OSError, StoreError), faults.here():
                writer.seal()
        told = False
        with contextlib.suppress(StoreError):  # a writer may refuse to go on, but not promise and forget
            begin(writer, FILES + 1, group=FILES + 1)
            writer.commit()
            told = True
        with contextlib.suppress(StoreError):
            writer.close()
        StoreWriter(store).close()
        after = read(store)
        assert {execution: after[execution] for execution in before} == before, at
        assert not told or FILES + 1 in after, at
        assert verify(store) == [], at
        with StoreReader(store) as reader:
            assert len(list(store.iterdir())) == len(reader.segments) + 1, at
            merged += len(reader.segments) == 1
        shutil.rmtree(store)
        if faults.count < at:
            break
    assert at > 20
    assert merged
