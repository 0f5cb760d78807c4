"""Boundaries: kept in the journal while their execution lives, through reopening and rotation; gone with it; never required."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trees.codec import decode, encode
from trees.records import Boundary, CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter


def begin(store: StoreWriter, executions: int = 1) -> None:
    store.append(Group(0, "t", executions, 0, 0))
    for index in range(executions):
        store.append(Execution(store.allocate_execution(), 0, index, 0))


def call(store: StoreWriter, execution: int, ended: bool = True) -> list[Boundary]:
    """One call with both of its boundaries; returns them."""
    number = store.allocate_call()
    prompt = store.context_node(-1, np.array([1, 2, number], np.int32), execution, number, Role.MAIN)
    store.append(Intent(number, execution, prompt, Role.MAIN, bytes(16)))
    boundaries = [Boundary(execution, number, prompt, 1, bytes([number] * 16), b"asked")]
    store.append(boundaries[0])
    if ended:
        sampled = store.allocate_node()
        ones = np.ones(2, np.float32)
        node = Node(
            sampled, prompt, execution, number, NodeKind.SAMPLED, Role.MAIN, np.array([7, 8], np.int32), -ones, ones.astype(np.int32)
        )
        store.append(node)
        store.append(CallEnd(number, execution, sampled, Fate.DELIVERED, "stop", "clean"))
        boundaries.append(Boundary(execution, number, sampled, 2, bytes([99 + number] * 16), b"answered"))
        store.append(boundaries[1])
    store.commit()
    return boundaries


def test_a_boundary_is_coded_bit_for_bit() -> None:
    for note in (b"", b"\0\xff" * 9):
        record = Boundary(1, 2, 3, 4, bytes(range(16)), note)
        assert list(decode(encode(record))) == [record]


def test_boundaries_survive_reopening_and_rotation_until_their_execution_is_sealed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        begin(store, 2)
        mine, other = [*call(store, 0), *call(store, 0, ended=False)], call(store, 1)
    with StoreWriter(tmp_path) as store:
        assert list(store.forest.boundaries[0].values()) == mine
        store.append(ExecutionEnd(1, "finished", 1.0, True, 1, 2, 1.0))
        assert len(store.seal()) == 1
        assert store.forest.boundaries == {0: {(b.call, b.node): b for b in mine}}
    with StoreReader(tmp_path) as reader:
        assert list(reader.live.boundaries) == [0]
        assert len(reader.tree(1).calls) == 1
        assert other[0].execution == 1
    with StoreWriter(tmp_path) as store:
        assert list(store.forest.boundaries[0].values()) == mine


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"call": 9}, "has no call 9"),
        ({"node": 99}, "ends neither prompt nor answer"),
        ({"node": -1}, "ends neither prompt nor answer"),
        ({"digest": b"short"}, "a digest has 16 bytes"),
        ({"note": bytes(1 << 17)}, "depth or note too large"),
        ({"depth": -1}, "depth or note too large"),
        ({"execution": 7}, "unknown or sealed"),
    ],
)
def test_a_boundary_that_fits_no_call_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with StoreWriter(tmp_path) as store:
        begin(store)
        (good, _) = call(store, 0)
        with pytest.raises(ValueError, match=why):
            store.append(Boundary(**{**good.__dict__, **change}))
