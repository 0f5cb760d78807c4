from __future__ import annotations

from dataclasses import replace

import pytest

from cells.events import Mode, Schedule
from cells.schedule import check_schedule

GOOD = Schedule(capacity=(4, 4), groups_per_step=2, group_size=2, phi=0.0, mu=2, steps=2)


def test_what_can_work_passes() -> None:
    check_schedule(GOOD)
    check_schedule(replace(GOOD, mode=Mode.ASYNC, trainers=1, staleness_bound=1))
    check_schedule(replace(GOOD, mode=Mode.ASYNC, standalone_capacity=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"standalone_capacity": -1}, "every cell needs at least one slot"),
        ({"mu": 0}, "mu = 0: must be 1 or more"),
        ({"steps": 0}, "steps = 0"),
        ({"staleness_bound": 0}, "a burst of mu = 2 steps needs at least 1"),
        ({"mode": Mode.ASYNC}, "nothing would be left for rollout"),
    ],
)
def test_what_can_not_is_refused_with_the_numbers(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(replace(GOOD, **change))  # type: ignore[arg-type]
