from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cells.events import (
    CapacityChanged,
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
from cells.policies import ElasticPolicy
from cells.schedule import ScheduleStuck
from tests.cells.world import World

ROLLOUT, TRAINING = Role.ROLLOUT, Role.TRAINING
UNDONE_CORE = Schedule(capacity=(1, 1, 1, 1), groups_per_step=2, group_size=3, phi=0.0, mu=3, steps=5)
"""With seed 1320 the core's transfer fails, and then, every cell in rollout, a skipped group is replaced beyond what they hold."""


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    mu = draw(st.integers(1, 3))
    capacity = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    standalone = draw(st.sampled_from([0, 0, 3, 8]))
    trainers = draw(st.none() | st.integers(1, len(capacity)))
    mode = draw(st.sampled_from(Mode))
    if mode is Mode.ASYNC and not standalone and trainers in (None, len(capacity)):
        standalone = 5
    return Schedule(
        capacity=capacity,
        groups_per_step=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 4)),
        phi=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        mu=mu,
        steps=draw(st.integers(1, 5)),
        standalone_capacity=standalone,
        staleness_bound=draw(st.none() | st.integers(mu - 1, mu + 2)),
        mode=mode,
        streaming=draw(st.booleans()),
        trainers=trainers,
        join_late=draw(st.booleans()),
    )


def world(schedule: Schedule, seed: int, void: float = 0.0, fails: float = 0.0, mortal: bool = False) -> World:
    chance = random.Random(seed)
    failed = 0

    def fail() -> bool:  # never often enough in a row for the policy to give up
        nonlocal failed
        failed = failed + 1 if failed < TRANSFER_ATTEMPTS - 1 and chance.random() < fails else 0
        return failed > 0

    return World(schedule, chance.randrange, lambda: chance.random() < void, fail, mortal)


def consumed_or_skipped(w: World) -> None:
    """No group is lost: each was trained once, is void, or is still there for a later step (which the last steps don't need)."""
    trained = [group for step in w.steps for group in step]
    assert len(trained) == len(set(trained))
    assert len(w.steps) == w.schedule.steps
    void = {g.group for g in w.groups.values() if g.valid == 0}
    known = w.policy.snapshot()
    assert void | set(trained) | w.dropped <= set(range(known["consumed_below"])) | set(known["consumed"])
    assert w.policy.skipped == len(void), "skipped twice, or not counted"
    left = set(w.groups) - set(trained) - void - w.dropped
    if not void and not w.restarts:
        assert not left
        assert all(len(step) == w.schedule.groups_per_step for step in w.steps)
    assert w.policy.outstanding == len(left) + len(w.dispatches)


def end_over_crashes(w: World, crashes: Sequence[int], crash: Callable[[], None] | None = None) -> None:
    """The run to its end, with a crash (or `crash`) after each of these numbers of events."""
    w.carry_out(w.policy.start())
    for events in [*crashes, 200_000]:
        for _ in range(events):
            if not w.over:
                w.happen()
        if not w.over:
            assert events < 200_000, "the run does not end"
            (crash or w.crash)()
    assert w.over
    consumed_or_skipped(w)


@settings(max_examples=500, deadline=None)
@given(schedules(), st.integers(0, 2**32))
def test_any_order_of_events_keeps_the_rules_and_ends(schedule: Schedule, seed: int) -> None:
    w = world(schedule, seed)
    w.run()
    consumed_or_skipped(w)


@settings(max_examples=700, deadline=None)
@given(schedules(), st.integers(0, 2**32), st.sampled_from([0.05, 0.3]), st.sampled_from([0.0, 0.3]))
def test_void_groups_and_failed_transfers_keep_the_rules_and_end(schedule: Schedule, seed: int, void: float, fails: float) -> None:
    w = world(schedule, seed, void, fails)
    w.run()
    consumed_or_skipped(w)


@settings(max_examples=700, deadline=None)
@given(schedules(), st.integers(0, 2**32), st.lists(st.integers(1, 60), min_size=1, max_size=4))
@example(UNDONE_CORE, 1320, [45])
def test_crashes_lose_no_group_and_repeat_no_step(schedule: Schedule, seed: int, crashes: list[int]) -> None:
    w = world(schedule, seed, void=0.1, fails=0.1)
    end_over_crashes(w, crashes)


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 2**32), st.integers(2, 4), st.lists(st.integers(1, 120), min_size=1, max_size=4))
def test_what_the_weights_between_checkpoints_sampled_is_trained_on_within_the_bound(
    schedule: Schedule, seed: int, every: int, crashes: list[int]
) -> None:
    w = world(schedule, seed, void=0.1, fails=0.1)
    w.checkpoint_every = every
    end_over_crashes(w, crashes)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 2**32), st.integers(2, 9), st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_stops_between_checkpoints_lose_no_step(schedule: Schedule, seed: int, every: int, stops: list[int]) -> None:
    w = world(schedule, seed, void=0.1, fails=0.1)
    w.checkpoint_every = every
    end_over_crashes(w, stops, w.stop)
    assert w.made == schedule.steps


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 2**32), st.sampled_from([0.0, 0.2]), st.integers(1, 3), st.lists(st.integers(1, 60), max_size=2))
def test_engines_that_die_and_come_back_are_never_counted_on(
    schedule: Schedule, seed: int, void: float, every: int, crashes: list[int]
) -> None:
    """All kinds of trouble at once."""
    w = world(schedule, seed, void, fails=0.1, mortal=True)
    w.checkpoint_every = every
    end_over_crashes(w, crashes)


def drive(policy: ElasticPolicy, *events: object) -> list[object]:
    out: list[object] = []
    for event in events:
        out += policy.on(event)  # type: ignore[arg-type]
    return out


def complete(policy: ElasticPolicy, group: int, size: int, valid: int | None = None) -> list[object]:
    finished = [ExecutionFinished(group)] * size
    return drive(policy, *finished, GroupComplete(group, size if valid is None else valid))


SMALL = Schedule(capacity=(4, 4, 4), groups_per_step=2, group_size=2, phi=0.5, mu=1, steps=3)


def test_one_burst_step_by_step() -> None:
    policy = ElasticPolicy(SMALL)
    assert policy.start() == [Dispatch(3, 0)]
    assert drive(policy, *(GroupDispatched(g, 0, 2) for g in range(3))) == []
    assert (policy.waterlevel, policy.capacity, policy.burst) == (6, 12, 0)
    assert complete(policy, 1, 2) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(1), Transfer(1, TRAINING)]
    assert drive(policy, TransferDone(1, TRAINING)) == []  # 4 are unfinished, without cell 2 nothing would hold them
    assert complete(policy, 0, 2) == [Feed(0), CloseStep(1)]
    assert policy.current == (1, 0)
    assert policy.snapshot() == {"step": 1, "burst": 0, "skipped": 0, "consumed_below": 2, "consumed": []}
    assert policy.snapshot(given_up=True) == {"step": 0, "burst": 0, "skipped": 0, "consumed_below": 0, "consumed": []}
    assert drive(policy, StepDone(1)) == [Publish(1)]
    assert drive(policy, Published(1)) == [Dispatch(2, 1), Transfer(1, ROLLOUT)]
    assert drive(policy, *(GroupDispatched(g, 1, 2) for g in (3, 4))) == []
    assert drive(policy, TransferDone(1, ROLLOUT)) == [Transfer(0, ROLLOUT)]
    assert drive(policy, TransferDone(0, ROLLOUT)) == []
    assert policy.burst == 1


def test_the_core_stays_when_the_next_batch_is_complete_and_the_rest_covers() -> None:
    policy = ElasticPolicy(replace(SMALL, phi=1.0, capacity=(4, 8)))
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(4)))
    complete(policy, 0, 2)
    for group in (1, 2, 3):
        complete(policy, group, 2)
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0), Feed(1), Transfer(1, TRAINING)]
    assert drive(policy, TransferDone(1, TRAINING)) == [CloseStep(1)]
    drive(policy, StepDone(1))
    # the core goes on with groups 2 and 3 once cell 1 can't claim any part of them
    assert drive(policy, Published(1)) == [Dispatch(2, 1), Transfer(1, ROLLOUT)]
    assert drive(policy, *(GroupDispatched(g, 1, 2) for g in (4, 5))) == []
    assert drive(policy, TransferDone(1, ROLLOUT)) == [Feed(2), Feed(3), CloseStep(2)]


def test_the_core_returns_when_the_rest_does_not_cover_what_is_dispatched() -> None:
    policy = ElasticPolicy(replace(SMALL, phi=1.0, capacity=(8, 3)))
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(4)))
    for group in range(4):
        complete(policy, group, 2)
    drive(policy, TransferDone(0, TRAINING), TransferDone(1, TRAINING), StepDone(1))
    assert drive(policy, Published(1)) == [Dispatch(2, 1), Transfer(1, ROLLOUT)]
    assert drive(policy, TransferDone(1, ROLLOUT)) == [Transfer(0, ROLLOUT)]


def test_a_multi_step_burst_publishes_once_and_ends_the_run() -> None:
    policy = ElasticPolicy(Schedule(capacity=(4,), groups_per_step=1, group_size=1, phi=0.0, mu=2, steps=3))
    assert policy.start() == [Dispatch(2, 0)]
    drive(policy, GroupDispatched(0, 0, 1), GroupDispatched(1, 0, 1))
    complete(policy, 0, 1)
    assert complete(policy, 1, 1) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0), CloseStep(1)]
    assert drive(policy, StepDone(1)) == [Feed(1), CloseStep(2)]
    assert drive(policy, StepDone(2)) == [Publish(2)]
    assert drive(policy, Published(2)) == [Dispatch(1, 2), Transfer(0, ROLLOUT)]
    drive(policy, TransferDone(0, ROLLOUT), GroupDispatched(2, 2, 1))
    assert complete(policy, 2, 1) == [Transfer(0, TRAINING)]
    drive(policy, TransferDone(0, TRAINING))
    assert drive(policy, StepDone(3)) == [Publish(3)]
    assert drive(policy, Published(3)) == [Finish()]


def test_a_skipped_group_is_replaced_while_it_fits() -> None:
    policy = ElasticPolicy(replace(SMALL, phi=0.0))
    policy.start()
    drive(policy, GroupDispatched(0, 0, 2), GroupDispatched(1, 0, 2))
    complete(policy, 0, 2)
    drive(policy, TransferDone(0, TRAINING))
    assert drive(policy, TransferDone(1, TRAINING)) == []
    assert complete(policy, 1, 2, valid=0) == [Dispatch(1, 0)]
    assert (policy.skipped, policy.skipped_in_a_row) == (1, 1)


def test_what_a_burst_keeps_in_hand_is_replaced_too() -> None:
    """Or else the next skipped group would be waited for at the burst's end."""
    policy = ElasticPolicy(SMALL)
    assert policy.start() == [Dispatch(3, 0)]
    drive(policy, *(GroupDispatched(group, 0, 2) for group in range(3)))
    assert complete(policy, 0, 2, valid=0) == [Dispatch(1, 0)]
    drive(policy, GroupDispatched(3, 0, 2))
    complete(policy, 1, 2)
    assert drive(policy, TransferDone(0, TRAINING))[0] == Feed(1)
    drive(policy, TransferDone(1, TRAINING))
    assert complete(policy, 2, 2, valid=0) == [Dispatch(1, 0)], "two of three are left, and one was fed"
    assert policy.outstanding == 2


def test_a_step_is_closed_short_when_nothing_can_replace_a_skipped_group() -> None:
    policy = ElasticPolicy(replace(SMALL, phi=0.0, capacity=(4, 1)))
    policy.start()
    drive(policy, GroupDispatched(0, 0, 2), GroupDispatched(1, 0, 2))
    complete(policy, 0, 2)
    drive(policy, ExecutionFinished(1))
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0)]
    assert drive(policy, ExecutionFinished(1), GroupComplete(1, 0)) == [Transfer(1, TRAINING)]
    assert drive(policy, TransferDone(1, TRAINING)) == [CloseStep(1)]


@pytest.mark.parametrize("bound", [None, 1])
def test_what_a_short_step_lacked_is_not_asked_for_again(bound: int | None) -> None:
    """Capacity that is back in the same burst: no step would be left for more, or none within the bound."""
    policy = ElasticPolicy(replace(SMALL, phi=0.0, mu=2, steps=2, capacity=(4,), standalone_capacity=8, staleness_bound=bound))
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(4)))
    complete(policy, 0, 2, valid=0)
    drive(policy, GroupDispatched(4, 0, 2), ExecutionFinished(1), ExecutionFinished(2), ExecutionFinished(3))
    assert drive(policy, ExecutionFinished(4), ExecutionFinished(1), GroupComplete(1, 2)) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING), CapacityChanged(None, 0)) == [Feed(1)]
    for group in (2, 3):
        assert complete(policy, group, 1, valid=0) == []
    assert complete(policy, 4, 1, valid=0) == [CloseStep(1)]
    assert drive(policy, CapacityChanged(None, 8), StepDone(1)) == [Dispatch(2, 0)]


def test_a_satellite_that_failed_to_leave_is_not_asked_again_in_this_burst() -> None:
    policy = ElasticPolicy(SMALL)
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(3)))
    complete(policy, 0, 2)
    assert drive(policy, TransferDone(0, TRAINING))[-1] == Transfer(1, TRAINING)
    assert drive(policy, TransferFailed(1, TRAINING)) == []
    assert complete(policy, 1, 2) == [Feed(1), CloseStep(1)]
    drive(policy, StepDone(1), Published(1), GroupDispatched(3, 1, 2), GroupDispatched(4, 1, 2), TransferDone(0, ROLLOUT))
    assert complete(policy, 2, 2) == [Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(2), Transfer(1, TRAINING)]  # and in the next one it is


def test_a_cell_waits_for_a_dead_engine_of_another_and_leaves_once_it_is_back() -> None:
    policy = ElasticPolicy(replace(SMALL, capacity=(4, 4), standalone_capacity=3))
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(3)))
    assert drive(policy, CapacityChanged(1, 0), CapacityChanged(None, 1)) == []
    assert policy.capacity == 5
    assert complete(policy, 0, 2) == []  # 4 are unfinished, and without cell 0 one slot serves
    assert drive(policy, CapacityChanged(None, 3)) == []
    assert drive(policy, CapacityChanged(1, 4)) == [Transfer(0, TRAINING)]


def test_nothing_is_replaced_into_a_dead_engine() -> None:
    policy = ElasticPolicy(replace(SMALL, phi=0.0, capacity=(4, 4)))
    policy.start()
    drive(policy, GroupDispatched(0, 0, 2), GroupDispatched(1, 0, 2))
    complete(policy, 0, 2)
    drive(policy, ExecutionFinished(1))
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(0)]
    assert drive(policy, CapacityChanged(1, 0), ExecutionFinished(1)) == []
    assert complete(policy, 1, 0, valid=0) == [Transfer(1, TRAINING)]  # nothing serves that it could take away


@pytest.mark.parametrize(("cell", "slots"), [(3, 4), (-1, 4), (0, -1), (None, -1)])
def test_a_capacity_of_nothing_is_refused(cell: int | None, slots: int) -> None:
    with pytest.raises(ValueError, match=f"cell {cell} of 3 can't hold {slots}"):
        ElasticPolicy(SMALL).on(CapacityChanged(cell, slots))


def test_the_same_transfer_failing_again_and_again_is_an_error() -> None:
    policy = ElasticPolicy(SMALL)
    policy.start()
    drive(policy, *(GroupDispatched(g, 0, 2) for g in range(3)))
    assert complete(policy, 0, 2) == [Transfer(0, TRAINING)]
    for _ in range(TRANSFER_ATTEMPTS - 1):
        assert drive(policy, TransferFailed(0, TRAINING)) == [Transfer(0, TRAINING)]
    with pytest.raises(ScheduleStuck, match="cell 0 to training failed 3 times"):
        policy.on(TransferFailed(0, TRAINING))


def test_groups_without_a_valid_execution_for_ever_are_an_error() -> None:
    policy = ElasticPolicy(SMALL)
    policy.start()
    for number in range(15):
        drive(policy, GroupDispatched(number, 0, 2), GroupComplete(number, 0))
    policy.on(GroupDispatched(15, 0, 2))
    with pytest.raises(ScheduleStuck, match="the last 16 groups had no valid execution"):
        policy.on(GroupComplete(15, 0))


def test_resume_feeds_again_what_the_checkpoint_does_not_have() -> None:
    saved = {"step": 1, "burst": 0, "skipped": 0, "consumed_below": 2, "consumed": []}
    policy = ElasticPolicy(SMALL, saved)
    frontier = [GroupFrontier(0, 0, 2, 2, 2), GroupFrontier(1, 0, 2, 2, 2), GroupFrontier(2, 0, 2, 2, 2), GroupFrontier(3, 1, 2, 1)]
    assert policy.resume(frontier) == [Dispatch(1, 1), Transfer(0, TRAINING)]
    assert drive(policy, TransferDone(0, TRAINING)) == [Feed(2), Transfer(1, TRAINING)]


def test_what_is_kept_between_two_steps_has_nothing_of_the_open_one() -> None:
    policy = ElasticPolicy(SMALL)
    policy.start()
    drive(policy, *(GroupDispatched(group, 0, 2) for group in range(3)))
    before = policy.snapshot()
    complete(policy, 0, 2)
    assert Feed(0) in drive(policy, TransferDone(0, TRAINING))
    assert policy.snapshot() == before


def test_resume_of_a_run_that_is_done_only_says_so() -> None:
    assert ElasticPolicy(SMALL, {"step": 3}).resume([GroupFrontier(0, 0, 2, 2, 2)]) == [Finish()]


def test_answers_to_nothing_are_refused() -> None:
    policy = ElasticPolicy(SMALL)
    policy.start()
    for event in (StepDone(1), Published(0), TransferDone(0, TRAINING)):
        with pytest.raises(ValueError, match=r"phase|no transfer"):
            policy.on(event)
    with pytest.raises(KeyError):
        policy.on(ExecutionFinished(17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": ()}, "slot"),
        ({"capacity": (4, 0)}, "slot"),
        ({"group_size": 0}, "group_size = 0"),
        ({"phi": -0.1}, "phi"),
        ({"mu": 3, "staleness_bound": 1}, "staleness_bound = 1: a burst of mu = 3 steps needs at least 2"),
    ],
)
def test_schedules_that_can_not_work_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticPolicy(replace(SMALL, **change))  # type: ignore[arg-type]
