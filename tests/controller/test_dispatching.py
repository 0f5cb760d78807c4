"""Groups are the gateway's before the policy hears of them, and their tasks go when nothing needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cells.events import Dispatch, GroupDispatched
from gyre_hpc.controller.dispatching import Dispatching
from gyre_hpc.controller.groups import Groups
from gyre_hpc.errors import Resumable
from gyre_hpc.events import EventLog
from gyre_hpc.tasks.source import ChoresSource


class FakeGateway:
    """Notes what it is given; `away`: it can't be reached."""

    def __init__(self) -> None:
        self.groups: list[Mapping[str, Any]] = []
        self.away = False

    def dispatch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if self.away:
            raise Resumable("the gateway is away", "the same command resumes")
        self.groups += groups


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def made(tmp_path: Path, gateway: FakeGateway) -> Dispatching:
    tasks = ChoresSource(3, [1], tmp_path / "tasks")
    return Dispatching(Groups(), tasks, gateway, EventLog(tmp_path / "events.jsonl"), 4)  # type: ignore[arg-type]


def test_new_groups_follow_those_before_each_with_a_task_of_its_own(made: Dispatching, gateway: FakeGateway) -> None:
    assert made.dispatch(Dispatch(2, 5), 1) == [GroupDispatched(0, 5, 4), GroupDispatched(1, 5, 4)]
    assert made.dispatch(Dispatch(1, 6), 2) == [GroupDispatched(2, 6, 4)]
    assert [(g["group"], g["size"], g["version"], g["burst"]) for g in gateway.groups] == [(0, 4, 5, 1), (1, 4, 5, 1), (2, 4, 6, 2)]
    assert len({g["task"] for g in gateway.groups}) == 3
    assert all(Path(g["task"]).is_dir() for g in gateway.groups)


def test_the_policy_hears_of_no_group_that_the_gateway_does_not_have(made: Dispatching, gateway: FakeGateway) -> None:
    gateway.away = True
    with pytest.raises(Resumable, match="the gateway is away"):
        made.dispatch(Dispatch(1, 0), 0)


def test_the_task_of_a_group_that_is_over_goes_and_a_drop_is_told(made: Dispatching, gateway: FakeGateway, tmp_path: Path) -> None:
    made.dispatch(Dispatch(2, 5), 1)
    first, second = (Path(g["task"]) for g in gateway.groups)
    made.release(0)
    assert (first.exists(), second.exists()) == (False, True)
    made.drop(1, step=9)
    assert not second.exists()
    (told,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (told["kind"], told["group"], told["version"], told["counts_as"], told["step"]) == ("group.dropped", 1, 5, 5, 9)
