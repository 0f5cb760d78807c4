"""The peers of the elastic schedule, burst by burst; what must hold in any order of events is in test_policy.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cells.events import (
    Claimed,
    CloseStep,
    Dispatch,
    ExecutionFinished,
    Feed,
    Finish,
    GroupComplete,
    GroupDispatched,
    GroupFrontier,
    Mode,
    Publish,
    Published,
    Role,
    Schedule,
    StepDone,
    Transfer,
    TransferDone,
    TransferFailed,
)
from cells.moves import TRANSFER_ATTEMPTS
from cells.policies import AsyncPolicy, ColocatePolicy, ElasticPolicy, make_policy
from cells.policy import Policy
from cells.schedule import ScheduleStuck

ROLLOUT, TRAINING = Role.ROLLOUT, Role.TRAINING
BASE = Schedule(capacity=(4, 4), groups_per_step=2, group_size=2, phi=0.0, mu=1, steps=2, standalone_capacity=2)


def drive(policy: Policy, *events: object) -> list[object]:
    out: list[object] = []
    for event in events:
        out += policy.on(event)  # type: ignore[arg-type]
    return out


def dispatched(policy: Policy, *groups: int, version: int = 0) -> list[object]:
    return drive(policy, *(GroupDispatched(g, version, 2) for g in groups))


def complete(policy: Policy, group: int) -> list[object]:
    return drive(policy, ExecutionFinished(group), ExecutionFinished(group), GroupComplete(group, 2))


def test_the_mode_names_the_policy() -> None:
    assert [type(make_policy(replace(BASE, mode=mode))) for mode in Mode] == [ElasticPolicy, ColocatePolicy, AsyncPolicy]


def test_colocate_trains_when_the_standalone_part_holds_the_rest_and_returns_whole() -> None:
    policy = make_policy(replace(BASE, mode=Mode.COLOCATE))
    assert policy.start() == [Dispatch(2, 0)]
    dispatched(policy, 0, 1)
    assert complete(policy, 0) == [Transfer(0, TRAINING)]  # 2 are unfinished and the pool has 2 slots
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0), Transfer(1, TRAINING)]
    assert drive(policy, TransferDone(1, TRAINING)) == []
    assert complete(policy, 1) == [Feed(1), CloseStep(1)]
    assert drive(policy, StepDone(1)) == [Publish(1)]
    assert drive(policy, Published(1)) == [Dispatch(2, 1), Transfer(1, ROLLOUT)]
    assert drive(policy, TransferDone(1, ROLLOUT)) == [Transfer(0, ROLLOUT)]


def test_colocate_replaces_no_more_than_the_burst_lacks() -> None:
    """A replacement that nobody waits for would keep all cells from training."""
    policy = make_policy(replace(BASE, mode=Mode.COLOCATE, phi=0.5))
    assert policy.start() == [Dispatch(3, 0)]
    dispatched(policy, 0, 1, 2)
    skipped = [*[ExecutionFinished(0)] * 2, GroupComplete(0, 0)]
    assert drive(policy, *skipped) == []
    assert drive(policy, *[ExecutionFinished(1)] * 2, GroupComplete(1, 0)) == [Dispatch(1, 0)]


def test_colocate_without_streaming_waits_for_the_whole_burst() -> None:
    policy = make_policy(replace(BASE, mode=Mode.COLOCATE, streaming=False, mu=2, phi=0.5, groups_per_step=1, standalone_capacity=2))
    assert policy.start() == [Dispatch(2, 0)]  # two steps are left: no more than they can consume
    dispatched(policy, 0, 1)
    assert complete(policy, 1) == []
    assert complete(policy, 0) == [Transfer(0, TRAINING)]
    drive(policy, TransferDone(0, TRAINING))
    assert drive(policy, TransferDone(1, TRAINING)) == [CloseStep(1)]
    assert drive(policy, StepDone(1)) == [Feed(1), CloseStep(2)]


def test_async_settles_its_pools_before_it_dispatches_and_never_moves_again() -> None:
    policy = make_policy(replace(BASE, mode=Mode.ASYNC, trainers=1, standalone_capacity=0, phi=0.5))
    assert policy.start() == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Dispatch(3, 0)]
    dispatched(policy, 0, 1, 2)
    assert policy.capacity == 4
    assert complete(policy, 2) == [Feed(2)]
    assert complete(policy, 0) == [Feed(0), CloseStep(1)]
    assert complete(policy, 1) == []
    assert drive(policy, StepDone(1)) == [Publish(1)]
    assert drive(policy, Published(1)) == [Dispatch(1, 1), Feed(1)]
    dispatched(policy, 3, version=1)
    assert complete(policy, 3) == [Feed(3), CloseStep(2)]
    assert drive(policy, StepDone(2)) == [Publish(2)]
    assert drive(policy, Published(2)) == [Finish()]


def test_async_without_streaming_feeds_a_batch_at_once() -> None:
    policy = make_policy(replace(BASE, mode=Mode.ASYNC, trainers=1, streaming=False))
    policy.start()
    assert drive(policy, TransferDone(0, TRAINING)) == [Dispatch(2, 0)]
    dispatched(policy, 0, 1)
    assert complete(policy, 1) == []
    assert complete(policy, 0) == [Feed(0), Feed(1), CloseStep(1)]


def test_async_goes_on_after_a_restart_with_what_the_ledger_holds() -> None:
    policy = make_policy(replace(BASE, mode=Mode.ASYNC, trainers=1), {"step": 1, "consumed_below": 2})
    assert policy.resume([GroupFrontier(2, 0, 2, 2, 2), GroupFrontier(3, 1, 2, 1)]) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(2)]
    assert drive(policy, ExecutionFinished(3), GroupComplete(3, 2)) == [Feed(3), CloseStep(2)]


def test_async_without_its_core_is_an_error() -> None:
    policy = make_policy(replace(BASE, mode=Mode.ASYNC, trainers=1))
    policy.start()
    for _ in range(TRANSFER_ATTEMPTS - 1):
        assert drive(policy, TransferFailed(0, TRAINING)) == [Transfer(0, TRAINING)]
    with pytest.raises(ScheduleStuck, match="cell 0 to training failed"):
        policy.on(TransferFailed(0, TRAINING))


def test_only_the_first_cells_train_and_the_others_are_a_pool() -> None:
    policy = make_policy(replace(BASE, trainers=1, standalone_capacity=0))
    policy.start()
    dispatched(policy, 0, 1)
    assert complete(policy, 0) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0)]
    assert complete(policy, 1) == [Feed(1), CloseStep(1)]  # with `trainers` open, cell 1 would have joined


def test_a_step_stays_open_for_late_cells_until_its_work_is_claimed() -> None:
    policy = make_policy(replace(BASE, join_late=True, standalone_capacity=0, capacity=(4, 4, 2), phi=0.5, mu=2, groups_per_step=1))
    policy.start()
    dispatched(policy, 0, 1)
    assert complete(policy, 0) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0), Transfer(1, TRAINING)]
    assert drive(policy, TransferDone(1, TRAINING)) == []
    assert complete(policy, 1) == [Transfer(2, TRAINING)]  # the step is full, and still open
    assert drive(policy, Claimed(1, 1)) == []  # not while a cell is in transit
    assert drive(policy, TransferDone(2, TRAINING)) == [CloseStep(1)]
    assert drive(policy, StepDone(1)) == [Feed(1)]
    assert drive(policy, Claimed(1, 1)) == []  # an answer that was late
    assert drive(policy, Claimed(2, 1)) == [CloseStep(2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainers": 0}, "trainers = 0: must be 1 to 2"),
        ({"trainers": 3}, "trainers = 3"),
        ({"mode": Mode.ASYNC, "standalone_capacity": 0}, "async needs cells that never train"),
    ],
)
def test_schedules_that_can_not_work_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(replace(BASE, **change))  # type: ignore[arg-type]


def test_only_async_keeps_satellites_which_then_need_the_new_weights() -> None:
    assert [make_policy(replace(BASE, mode=mode)).keeps_satellites for mode in Mode] == [False, False, True]
