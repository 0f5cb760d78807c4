"""Blocks against the token paths written out."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trees.forests import Play, Turn, forests
from trees.blocks import count_blocks
from trees.store import StoreReader


@settings(max_examples=30, deadline=None)
@given(forests, st.integers(1, 5))
def test_blocks_are_places_in_the_tree(turns: list[Turn], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder))
        play.play(turns)
        play.writer.close()
        model = play.model
        places, expanded = set(), 0
        for intent, _ in model.calls.values():
            path = [(node, i) for node in model.path(intent.prompt) for i in range(len(model.nodes[node].tokens))]
            places |= set(path[size - 1 :: size])
            expanded += len(path) // size
        with StoreReader(Path(folder)) as reader:
            assert count_blocks(reader, size) == (len(places), expanded)
            with pytest.raises(ValueError, match="blocks of 0"):
                count_blocks(reader, 0)
