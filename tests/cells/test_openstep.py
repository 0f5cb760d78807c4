from __future__ import annotations

from cells.openstep import OpenStep


def test_a_step_fills_up_is_claimed_and_begins_again_empty() -> None:
    step = OpenStep(2)
    assert (len(step), step.full, step.all_claimed) == (0, False, True)
    step.feed(7)
    assert (7 in step, 3 in step, step.full, step.all_claimed) == (True, False, False, False)
    step.claim(1)
    assert step.all_claimed
    step.feed(3)
    assert (step.full, step.all_claimed, step.groups) == (True, False, (7, 3))
    step.claim(2)
    step.claim(1)  # an older word that comes late takes nothing back
    assert step.all_claimed
    assert step.done() == (7, 3)
    step.feed(4)
    assert (step.groups, step.full, step.all_claimed) == ((4,), False, False)
