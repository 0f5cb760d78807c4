"""Many random sessions, appended to a store that is never sealed: quick, so that rare shapes of a tree are met."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from gyre_hpc.imports.recording import Recording
from gyre_hpc.imports.traces import read_sessions
from tests.imports.sessions import Row, sessions, write
from tests.imports.test_importer import check_session, trie
from trees.store import StoreWriter


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreWriter]:
    """One store for all sessions."""
    with StoreWriter(tmp_path_factory.mktemp("store")) as writer:
        yield writer


@settings(max_examples=150, deadline=None)
@given(sessions())
def test_every_session_is_a_trie(writer: StoreWriter, row: Row) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (session,) = read_sessions(write(Path(folder) / "t", row))
    # Far above all runs so far: no session may meet another's tokens.
    recording = Recording(writer, session, 1000 * (1 + len(writer.forest.executions)))
    recording.play()
    tree = writer.forest.tree(max(writer.forest.executions))
    assert recording.tokens == sum(node.length for node in tree.nodes.values()) == trie(check_session(tree, row))
