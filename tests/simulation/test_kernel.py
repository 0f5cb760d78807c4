"""The kernel against sums done by hand, and what must hold for any scenario."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.events import Mode, Schedule
from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.scenario import Costs, Faults, Scenario, beyond, cut
from gyre_hpc.simulation.workload import Limits, LogNormal, Recorded

COSTS = Costs(to_training=10.0, to_rollout=5.0, close=2.0, publish=1.0)
SCHEDULE = Schedule((1,), groups_per_step=2, group_size=2, phi=0.0, mu=1, steps=2, mode=Mode.COLOCATE, streaming=False, join_late=True)


def small(slots_per_node: float = 2.0, **schedule: object) -> Scenario:
    """Two nodes, one cell; every execution takes 100 s; a group costs 50 node-seconds to train on."""
    changed = replace(SCHEDULE, **schedule)  # type: ignore[arg-type]
    return cut(changed, 2, 1, slots_per_node, 50.0, Recorded(((100.0, 100.0),)), costs=COSTS)


def test_colocate_is_the_sum_of_its_parts() -> None:
    found = simulate(small())
    # rollout, transfer, two groups on two nodes, close, publish; twice, and one return
    assert found.seconds == pytest.approx(2 * (100 + 10 + 50 + 2 + 1) + 5)
    assert list(found.steps) == pytest.approx([162.0, 163 + 5 + 162.0])
    assert (found.executions, found.transfers, found.staleness) == (8, 3, 0.0)
    assert found.bound == pytest.approx((4 * 50 + 8 * 100 * 0.5) / 2)
    assert found.idle == pytest.approx(1 - found.bound / found.seconds)


def test_executions_without_a_slot_wait_for_one() -> None:
    assert simulate(small(slots_per_node=1.0)).seconds == pytest.approx(2 * (200 + 10 + 50 + 2 + 1) + 5)


def test_a_full_engine_slows_its_executions_down() -> None:
    assert simulate(replace(small(), beta=0.25)).seconds == pytest.approx(2 * (125 + 10 + 50 + 2 + 1) + 5)


def test_async_trains_beside_the_rollout() -> None:
    schedule = replace(SCHEDULE, mode=Mode.ASYNC, phi=1.0, steps=2)
    found = simulate(cut(schedule, 2, 1, 8.0, 10.0, Recorded(((100.0, 100.0),)), standalone=1, costs=COSTS))
    # four groups at 10 s, all over at 110 s; then two steps of 20 s, each closed and published
    assert found.seconds == pytest.approx(10 + 100 + 2 * (20 + 2 + 1))
    assert (found.transfers, found.staleness) == (1, 0.5)


def test_a_cell_leaves_when_the_others_hold_the_rest_and_its_executions_go_on() -> None:
    schedule = replace(SCHEDULE, mode=Mode.ELASTIC, streaming=True, groups_per_step=1, steps=4, phi=1.0)
    durations = Recorded(((100.0, 100.0), (1000.0, 1000.0)))
    seed = next(s for s in range(50) if [durations.group(s, g, 2)[0] for g in (0, 1)] == [100.0, 1000.0])
    found = simulate(replace(cut(schedule, 2, 2, 2.0, 60.0, durations, costs=COSTS), window=1), seed, record=True)
    # group 0 is over at 100, cell 0 leaves (one execution is moved), trains 60 alone: cell 1 holds the other group to the end
    assert found.seconds == pytest.approx(100 + 10 + 60 + 2 + 1)
    assert (found.moved, found.transfers) == (1, 1)
    assert [(s.cell, s.state, s.start) for s in found.spans] == [
        (0, "rollout", 0.0),
        (0, "transfer", 100.0),
        (0, "training", 110.0),
        (1, "rollout", 0.0),
    ]


def test_a_limit_ends_executions_and_the_overall_one_takes_them_out() -> None:
    slow = replace(small(), workload=Recorded(((100.0, 500.0),), Limits(harness=200.0)))
    found = simulate(slow)
    assert found.seconds == pytest.approx(2 * (200 + 10 + 50 + 2 + 1) + 5)
    assert (found.cut, found.skipped) == (4, 0)
    never = replace(slow, workload=Recorded(((100.0, 100.0), (500.0, 500.0)), Limits(overall=200.0)))
    assert simulate(never, seed=3).skipped > 0  # groups without a valid execution are replaced


def test_groups_that_may_not_be_trained_on_are_replaced() -> None:
    some = replace(small(), workload=Recorded(((100.0, 100.0), (100.0, 100.0)), replay=True, void=frozenset({1})))
    found = simulate(some)  # of 0, 1 the second, of 3, 4 the first, and 5, which replaces it
    assert found.skipped == 3
    assert found.seconds == pytest.approx((200 + 10 + 50 + 2 + 1) + 5 + (300 + 10 + 50 + 2 + 1))
    with pytest.raises(GyreError, match="the last 16 groups had no valid execution"):
        simulate(replace(some, workload=replace(some.workload, void=frozenset({0, 1}))))


def test_a_preempted_run_repeats_the_open_step_only() -> None:
    base = small()
    lost = simulate(replace(base, faults=Faults(preempt_every=200.0, restart=1000.0)))
    # at 200 s step 1 is done; step 2 rolls out anew from 1200 s on and is done before the next end of an allocation
    assert lost.seconds == pytest.approx(1200 + 100 + 10 + 50 + 2 + 1)
    kept = simulate(replace(base, faults=Faults(preempt_every=200.0, restart=1000.0, executions_survive=True)))
    assert kept.seconds == pytest.approx(lost.seconds - (200 - 168))
    assert (lost.faults, kept.faults, len(lost.steps)) == (1, 1, 2)


def test_a_run_that_faults_let_get_nowhere_is_an_error() -> None:
    with pytest.raises(GyreError, match="200 attempts in a row end before step 1 is done"):
        simulate(replace(small(), faults=Faults(preempt_every=50.0, restart=10.0)))
    with pytest.raises(GyreError, match="more than ten years"):
        simulate(replace(small(), faults=Faults(preempt_every=50.0, restart=1e7)))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    mode = draw(st.sampled_from(Mode))
    cells, per_cell = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    standalone = draw(st.integers(1 if mode is Mode.ASYNC else 0, 3))
    mu = draw(st.integers(1, 3))
    schedule = Schedule(
        (1,),
        groups_per_step=draw(st.integers(1, 4)),
        group_size=draw(st.integers(1, 4)),
        phi=draw(st.sampled_from([0.0, 0.5, 1.5])),
        mu=mu,
        staleness_bound=draw(st.sampled_from([None, mu - 1, mu])),  # also under faults no group gets too old: the kernel refuses a Drop
        steps=draw(st.integers(1, 5)),
        mode=mode,
        streaming=draw(st.booleans()),
        join_late=draw(st.booleans()),
    )
    limits = draw(st.sampled_from([Limits(), Limits(harness=150.0), Limits(overall=220.0)]))
    skips = draw(st.sampled_from([0.0, 0.0, 0.2]))
    made = cut(
        schedule, cells * per_cell + standalone, cells, draw(st.sampled_from([1.0, 2.5])), draw(st.sampled_from([5.0, 80.0])),
        LogNormal(100.0, 0.3, 0.4, limits, skips), standalone, draw(st.sampled_from([0.0, 0.3])), replace(COSTS, hand_over=3.0),
    )  # fmt: skip
    faults = draw(
        st.sampled_from(
            [
                Faults(),
                Faults(node_mtbf=40_000.0, restart=60.0),
                Faults(node_mtbf=40_000.0, executions_survive=True),
                Faults(engine_mtbf=900.0, engine_start=40.0),
                Faults(node_mtbf=40_000.0, engine_mtbf=2000.0, engine_start=500.0),
                Faults(node_mtbf=8000.0, restart=30.0, executions_survive=True),
            ]
        )
    )
    if draw(st.booleans()):
        longer, window = beyond(made.schedule, schedule.steps)
        made = replace(made, schedule=longer, window=window)
    return replace(made, faults=faults)


@settings(max_examples=150, deadline=None)
@given(scenarios(), st.integers(0, 1000))
def test_any_run_ends_having_done_its_work_in_no_less_than_the_bound(scenario: Scenario, seed: int) -> None:
    found = simulate(scenario, seed, record=True)
    schedule = scenario.schedule
    steps = scenario.window or schedule.steps
    assert len(found.steps) == steps
    assert list(found.steps) == sorted(found.steps)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert -1e-9 <= found.idle <= 1
    assert 0 <= found.idle_rollout <= found.idle + 1e-9
    if not found.skipped and not found.faults:
        groups = steps * schedule.groups_per_step
        assert found.executions >= groups * schedule.group_size
        assert found.seconds * scenario.all_nodes >= groups * scenario.train_group
    check_spans(found, len(scenario.nodes))
    assert simulate(scenario, seed, record=True) == found


def check_spans(found: Outcome, cells: int) -> None:
    """Each cell's states follow one another without a gap."""
    for cell in range(cells):
        spans = [s for s in found.spans if s.cell == cell]
        assert (spans[0].start, spans[-1].end) == (0.0, found.seconds)
        assert all(a.end == b.start for a, b in pairwise(spans))


def test_a_window_does_not_wait_for_the_end_of_the_run() -> None:
    work = LogNormal(100.0, 0.3, 0.4)
    schedule = replace(SCHEDULE, mode=Mode.ELASTIC, streaming=True, phi=0.5, mu=2, steps=6)
    whole = cut(schedule, 4, 4, 2.0, 20.0, work, costs=COSTS)
    longer, window = beyond(schedule, 5)
    assert (window, longer.steps) == (6, 6 + 1 + 4)
    looked = replace(whole, schedule=replace(whole.schedule, steps=longer.steps), window=window)
    for seed in range(5):
        inside, full = simulate(looked, seed), simulate(whole, seed)
        assert len(inside.steps) == len(full.steps) == 6
        assert inside.seconds <= full.seconds
        # the same run until its end comes into sight
        assert inside.steps[:4] == full.steps[:4]
        again = simulate(replace(looked, schedule=replace(looked.schedule, steps=longer.steps + 10)), seed)
        assert (again.seconds, again.steps) == (inside.seconds, inside.steps)
    lost = simulate(replace(looked, faults=Faults(preempt_every=0.7 * simulate(looked).seconds)))
    assert len(lost.steps) == 6
    assert lost.faults > 0
