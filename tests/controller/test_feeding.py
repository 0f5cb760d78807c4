"""Groups of a step: announced in order, given out once, numbered anew in the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cells.epochs import Channel
from cells.events import Claimed
from gyre_hpc.controller.feeding import Feeding
from gyre_hpc.controller.groups import Groups
from gyre_hpc.controller.messages import Work, decode
from gyre_hpc.controller.plan import Planner
from gyre_hpc.controller.stepwork import StepWork
from tests.controller.test_plan import record
from trees.records import Group
from trees.store import StoreReader, StoreWriter


class Told:
    """The cells' end of the channel (the outer edge)."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def announce(self, message: dict[str, Any], agree: bool) -> int:
        assert not agree
        self.work.append(cast(Work, decode(message)))
        return len(self.work)


class Claims:
    def __init__(self) -> None:
        self.taken = 0
        self.steps: list[int] = []

    def claimed(self) -> int:
        return self.taken

    def next_step(self, items: int) -> None:
        self.steps.append(items)


def ended(store: StoreWriter, groups: Groups, scores: Sequence[float]) -> int:
    """A group whose executions are all recorded and scored."""
    number = groups.next_group
    store.append(Group(number, "task", len(scores), 0, 0))
    groups.dispatched(number, "task", len(scores), 0)
    for index, score in enumerate(scores):
        execution = record(store, number, index, score, 3)
        change = {"group": number, "index": index, "execution": execution, "score": score, "valid": True}
        groups.on_change({"kind": "ended", "reason": "finished", **change})
    store.commit()
    return number


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_step_is_fed_closed_and_the_next_one_begins_anew(tmp_path: Path, shuffled: bool) -> None:
    told, claims, groups = Told(), Claims(), Groups()
    with StoreWriter(tmp_path) as store:
        feeding = Feeding(Planner(StoreReader(tmp_path), 5, 1, 16), StepWork(claims), cast(Channel, told), shuffled)
        first = [ended(store, groups, (1.0, 0.0)), ended(store, groups, (0.0, 1.0))]
        feeding.feed(first, groups, 1)
        items = [item for work in told.work for item in work.items]
        assert [work.first for work in told.work] == ([0] if shuffled else [0, 1])
        claims.taken = len(items)
        assert feeding.look(1) == (Claimed(1, 2), True)
        plans, count = feeding.close()
        assert [number for number, _ in plans] == first
        assert count == len(items) > 0
        feeding.closed()
        assert claims.steps == [count]
        second = ended(store, groups, (1.0, 0.0))
        feeding.feed([second], groups, 2)
        assert told.work[-1].first == 0
        assert [number for number, _ in feeding.close()[0]] == [second]
