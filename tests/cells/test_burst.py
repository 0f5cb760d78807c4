from __future__ import annotations

from dataclasses import replace

import pytest

from cells.burst import Backlog, Consumed, boundary_target, holds_back
from cells.events import GroupFrontier, Schedule

SCHEDULE = Schedule(capacity=(8,), groups_per_step=4, group_size=2, phi=0.5, mu=3, steps=10)


def test_boundary_asks_for_phi_plus_mu_batches_but_never_for_more_than_the_steps_left() -> None:
    assert boundary_target(SCHEDULE, 0) == 14
    assert boundary_target(SCHEDULE, 7) == 12
    assert boundary_target(SCHEDULE, 9) == 4
    assert boundary_target(replace(SCHEDULE, phi=0.3, mu=1), 0) == 6  # rounded up, and 1.3 * 4 is not 5.2000000001
    assert boundary_target(replace(SCHEDULE, staleness_bound=2), 0) == 12


def test_consumed_stays_small_and_knows_everything() -> None:
    consumed = Consumed()
    for group in (1, 3, 0, 2, 7):
        consumed.add(group)
    assert (consumed.below, consumed.above) == (4, [7])
    assert [g in consumed for g in range(9)] == [True] * 4 + [False] * 3 + [True, False]
    assert consumed.with_groups([4, 5]).below == 6
    assert consumed.below == 4


def test_ready_is_oldest_version_first_then_by_id() -> None:
    backlog = Backlog()
    for group, version in ((5, 1), (3, 2), (4, 1), (6, 0)):
        assert backlog.dispatched(group, version, 2)
    assert not backlog.dispatched(5, 1, 2)
    for group in (5, 3, 4):
        backlog.complete(group, 2)
    assert [g.group for g in backlog.ready()] == [4, 5, 3]
    assert backlog.waterlevel == 2
    backlog.finished(6)
    backlog.complete(6, 0)
    assert [g.group for g in backlog.void()] == [6]
    with pytest.raises(KeyError):
        backlog.finished(99)


def test_restore_keeps_what_is_over_and_forgets_what_was_consumed() -> None:
    backlog = Backlog(Consumed(1))
    backlog.restore(
        [GroupFrontier(0, 0, 2, 2, 2), GroupFrontier(1, 0, 2, 1), GroupFrontier(2, 0, 2, 2, 1), GroupFrontier(3, 0, 2, 2, 2, trained=True)]
    )
    assert [(g.group, g.unfinished, g.valid) for g in backlog] == [(1, 1, None), (2, 0, 1)]
    assert 3 in backlog.consumed


def test_a_younger_group_waits_when_older_ones_need_the_slots() -> None:
    schedule = replace(SCHEDULE, groups_per_step=2, mu=1, staleness_bound=1)
    backlog = Backlog()
    for group, version in ((0, 0), (1, 0), (2, 1)):
        backlog.dispatched(group, version, 2)
    backlog.complete(2, 2)
    young = backlog.ready()[0]
    # after step 1 both groups of version 0 must be in step 2, the open one
    assert holds_back(backlog, young, schedule, step=1, fed=0)
    assert not holds_back(backlog, young, replace(schedule, staleness_bound=2), step=1, fed=0)
    assert not holds_back(backlog, young, replace(schedule, staleness_bound=None), step=1, fed=0)
    backlog.take(0)
    assert not holds_back(backlog, young, schedule, step=1, fed=0)
    assert holds_back(backlog, young, schedule, step=1, fed=1)
