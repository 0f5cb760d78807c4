"""What moving executions costs, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cells.events import Mode
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation.handover import NO_HAND_OVER, HandOver, How, hand_over
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.scenario import Scenario, cut
from gyre_hpc.simulation.study import Study, under
from gyre_hpc.simulation.tables import render, study
from gyre_hpc.simulation.trouble import Trouble
from gyre_hpc.simulation.workload import Recorded
from tests.simulation.test_kernel import COSTS, SCHEDULE
from tests.simulation.test_trouble import paper_122b

NIXL = HandOver(How.NIXL, context=1000.0, kv_bytes=8.0, link=400.0)
AGAIN = HandOver(How.RECOMPUTE, context=1000.0, prefill=50.0)


def two_waves() -> tuple[Scenario, int]:
    """Cell 0 leaves at 100 s with one execution on it (tests/simulation/test_kernel.py); one node a cell; and the seed."""
    schedule = replace(SCHEDULE, mode=Mode.ELASTIC, streaming=True, groups_per_step=1, steps=4, phi=1.0)
    durations = Recorded(((100.0, 100.0), (1000.0, 1000.0)))
    seed = next(s for s in range(50) if [durations.group(s, g, 2)[0] for g in (0, 1)] == [100.0, 1000.0])
    return replace(cut(schedule, 2, 2, 2.0, 60.0, durations, costs=COSTS), window=1), seed


def test_seconds_and_bytes() -> None:
    assert NIXL.moved_bytes(3) == 24_000
    assert NIXL.wait(3, 2) == NIXL.longer(3, 2) == 24_000 / 800
    assert AGAIN.wait(3, 2) == 3000 / 100
    assert (AGAIN.longer(3, 2), AGAIN.moved_bytes(3)) == (0.0, 0.0)
    assert (NO_HAND_OVER.any, NO_HAND_OVER.wait(3, 2)) == (False, 0.0)


def test_kv_on_its_way_keeps_the_source_and_recomputation_only_the_execution() -> None:
    base, seed = two_waves()
    calm = simulate(base, seed)
    travels = simulate(replace(base, costs=replace(COSTS, kv=NIXL)), seed)
    again = simulate(replace(base, costs=replace(COSTS, kv=AGAIN)), seed)
    assert (calm.moved, calm.moved_bytes, calm.moved_seconds) == (1, 0.0, 0.0)
    assert travels.seconds == pytest.approx(calm.seconds + 8000 / 400)
    assert (travels.moved_bytes, travels.moved_seconds) == (8000.0, 20.0)
    assert again.seconds == pytest.approx(calm.seconds), "the window ends before the one that was moved"
    assert (again.moved_bytes, again.moved_seconds) == (0.0, 20.0)
    slower = simulate(replace(base, window=None, costs=replace(COSTS, kv=AGAIN)), seed)
    assert slower.seconds > simulate(replace(base, window=None), seed).seconds


def test_options_are_complete_or_refused() -> None:
    assert hand_over(None, 0, 0, 0, 0) is NO_HAND_OVER
    assert hand_over(How.NIXL, 1000.0, 8.0, 2.0, 0) == HandOver(How.NIXL, 1000.0, 8.0, 2e9)
    with pytest.raises(ConfigError, match="--handover nixl needs numbers; give --kv-bytes, --link"):
        hand_over(How.NIXL, 1000.0, 0, 0, 5.0)
    with pytest.raises(ConfigError, match="give --context-tokens, --prefill"):
        hand_over(How.RECOMPUTE, 0, 1.0, 1.0, 0)
    with pytest.raises(ConfigError, match="give --handover nixl or recompute"):
        hand_over(None, 1000.0, 0, 0, 0)


def test_the_tables_name_the_numbers_and_what_moved() -> None:
    whole = paper_122b()
    small = under(Study(whole.name, whole.title, (), whole.rows[5:6], (), whole.tuned[:1], (), ()), Trouble(kv=replace(NIXL, link=4e9)))
    found = study(small, 1)
    assert {p["name"]: p["value"] for p in found["parameters"]} == {"context_tokens": 1000.0, "kv_bytes": 8.0, "link": 4.0}
    row = found["rows"][0]
    assert row["moved_bytes"] == row["moved"] * 8000
    assert "TB of KV" in render(found)
    assert NIXL.words() == "nixl of 1000 tokens an execution, 8 B each over 4e-07 GB/s a node"
    assert AGAIN.words() == "recompute of 1000 tokens an execution, 50 a second a node"
