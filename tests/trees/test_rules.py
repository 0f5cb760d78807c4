"""An answer may be superseded once it was delivered; nothing else of a call that is over changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trees.records import CallEnd, Execution, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter

DELIVERED = CallEnd(0, 0, 1, Fate.DELIVERED, "stop", "clean")


def written(folder: Path) -> StoreWriter:
    writer = StoreWriter(folder)
    row = np.array([7], np.int32)
    writer.append(Group(0, "task", 1, 0, 0))
    writer.append(Execution(0, 0, 0, 0))
    writer.append(Node(0, -1, 0, 0, NodeKind.CONTEXT, Role.MAIN, row))
    writer.append(Intent(0, 0, 0, Role.MAIN, bytes(16)))
    writer.append(Node(1, 0, 0, 0, NodeKind.SAMPLED, Role.MAIN, row, np.zeros(1, np.float32), np.zeros(1, np.int32)))
    return writer


def test_a_delivered_answer_is_superseded_for_every_reader(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.append(DELIVERED)
    writer.commit()
    reader = StoreReader(tmp_path)
    assert reader.tree(0).is_target(1)
    writer.append(replace(DELIVERED, fate=Fate.SUPERSEDED))
    writer.commit()
    reader.refresh()
    for late in (reader, StoreReader(tmp_path)):
        assert late.tree(0).calls[0].fate is Fate.SUPERSEDED
        assert not late.tree(0).is_target(1)
    with pytest.raises(ValueError, match="call 0 is over"):
        writer.append(replace(DELIVERED, fate=Fate.SUPERSEDED))
    writer.close()


@pytest.mark.parametrize("change", [{}, {"fate": Fate.BROKEN}, {"fate": Fate.SUPERSEDED, "sampled": -1}, {"finish": "length"}])
def test_nothing_else_of_a_call_that_is_over_changes(tmp_path: Path, change: dict[str, Any]) -> None:
    writer = written(tmp_path)
    writer.append(DELIVERED)
    with pytest.raises(ValueError, match="call 0 is over"):
        writer.append(replace(DELIVERED, **change))
    writer.close()


def test_a_broken_answer_can_not_be_superseded(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.append(replace(DELIVERED, fate=Fate.BROKEN))
    with pytest.raises(ValueError, match="call 0 is over"):
        writer.append(replace(DELIVERED, fate=Fate.SUPERSEDED))
    writer.close()
