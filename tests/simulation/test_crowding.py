"""What executions waited for one another, against sums done by hand."""

from __future__ import annotations

import pytest

from gyre_hpc.report.summary import Span
from gyre_hpc.simulation.crowding import Ended, slots_over_time, without_waiting
from gyre_hpc.simulation.workload import Recorded


def test_turns_are_taken_out_and_nothing_else() -> None:
    # three at once on two slots from 0 to 30; then one is over, and there is room
    ended = [Ended(0, 30.0, 30.0), Ended(1, 50.0, 50.0), Ended(0, 60.0, 60.0)]
    found = without_waiting(Recorded(((30.0, 60.0), (50.0,)), spread=0.2), ended, [(float("-inf"), 2)])
    assert found.groups == (pytest.approx((20.0, 50.0)), pytest.approx((40.0,)))
    assert found.spread == 0.2
    roomy = without_waiting(Recorded(((30.0, 60.0), (50.0,))), ended, [(float("-inf"), 3)])
    assert roomy.groups == (pytest.approx((30.0, 60.0)), pytest.approx((50.0,)))


def test_a_cell_serves_while_it_is_in_rollout_and_standalone_ones_always() -> None:
    spans = [Span(0, "rollout", 0.0, 10.0), Span(0, "training", 10.0, 20.0), Span(0, "rollout", 20.0, 30.0), Span(1, "rollout", 0.0, 30.0)]
    slots = slots_over_time(spans, 1000.0, (2,), 2)
    assert slots == [(float("-inf"), 2), (1000.0, 2), (1010.0, -2), (1020.0, 2), (1030.0, -2)]
    ended = [Ended(group, 1030.0, 30.0) for group in range(4)]
    found = without_waiting(Recorded(((30.0,),) * 4), ended, slots)
    assert found.groups == (pytest.approx((25.0,)),) * 4  # from 10 to 20 two slots for four


def test_what_ran_without_any_slot_keeps_its_duration() -> None:
    assert without_waiting(Recorded(((5.0,),)), [Ended(0, 5.0, 5.0)], [(float("-inf"), 0)]).groups == ((5.0,),)
