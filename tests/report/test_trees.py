"""Looking at one tree by its id, as people type it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.report.trees import describe_execution, render_execution
from tests.trees.forests import begin, one_call
from trees.records import Role
from trees.store import StoreWriter


def test_an_execution_is_described_by_its_id(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        begin(writer)
        one_call(writer, 0, writer.context_node(-1, [1, 2, 3], 0, -1, Role.MAIN))
    found = describe_execution(tmp_path, "0")
    assert (found["execution"], found["calls"][0]["fate"]) == (0, "delivered")
    assert render_execution(found).splitlines() == ["0: 3 tokens, context, main", "1: 2 tokens, target, main, call 0"]


@pytest.mark.parametrize("name", ["1", "-1", "x", "", "²", "99999999999999999999"])
def test_what_is_no_id_is_told_with_the_ids_there_are(tmp_path: Path, name: str) -> None:
    with StoreWriter(tmp_path) as writer:
        with pytest.raises(ConfigError, match="none recorded yet"):
            describe_execution(tmp_path, name)
        begin(writer)
        writer.commit()
        with pytest.raises(ConfigError, match="known ids: 0 to 0"):
            describe_execution(tmp_path, name)
