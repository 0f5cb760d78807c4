from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.workload import Limits, LogNormal, Recorded, read_recorded


def test_what_is_drawn_depends_on_seed_and_group_alone() -> None:
    work = LogNormal(3600.0, 0.2, 0.3)
    forwards = [list(work.group(7, g, 4)) for g in range(200)]
    again = LogNormal(3600.0, 0.2, 0.3)
    assert [list(again.group(7, g, 4)) for g in reversed(range(200))] == forwards[::-1]
    assert list(work.group(8, 0, 4)) != forwards[0]


def test_the_mean_and_both_spreads_are_those_that_were_asked_for() -> None:
    work = LogNormal(100.0, 0.4, 0.2)
    drawn = np.array([work.group(1, g, 8) for g in range(20_000)])
    assert drawn.mean() == pytest.approx(100.0, rel=0.02)
    logs = np.log(drawn)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.2, rel=0.05)
    assert logs.mean(axis=1).std() == pytest.approx((0.4**2 + 0.2**2 / 8) ** 0.5, rel=0.03)


def test_recorded_groups_are_drawn_as_wholes() -> None:
    work = Recorded(((1.0, 2.0), (30.0, 40.0)))
    assert {tuple(work.group(0, g, 2)) for g in range(50)} == {(1.0, 2.0), (30.0, 40.0)}
    for g in range(50):
        five = set(work.group(0, g, 5))
        assert five <= {1.0, 2.0} or five <= {30.0, 40.0}
    assert (work.executions, work.mean) == (4, 18.25)


def test_a_replay_gives_every_group_its_own() -> None:
    work = Recorded(((1.0, 2.0), (30.0, 40.0), (5.0,)), replay=True)
    assert [tuple(work.group(9, g, 2)) for g in (0, 1, 3, 4)] == [(1.0, 2.0), (30.0, 40.0)] * 2
    assert tuple(work.group(9, 2, 2)) in {(1.0, 2.0), (30.0, 40.0), (5.0, 5.0)}  # a group of another size is drawn


def test_an_event_log_and_plain_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    events = [
        {"seq": 0, "kind": "run.start", "attempt": 1},
        {"seq": 1, "kind": "execution.end", "group": 3, "index": 0, "seconds": 2.5},
        {"seq": 2, "kind": "execution.end", "group": 4, "index": 0, "seconds": 0.0},
        {"seq": 3, "kind": "execution.end", "group": 3, "index": 1, "seconds": 4.0},
    ]
    log.write_text("".join(json.dumps(e) + "\n" for e in events) + '{"seq": 4, "kind": "execu')
    assert read_recorded(log).groups == ((2.5, 4.0),)
    log.write_text('{"group": "a", "seconds": 1}\n{"group": "b", "seconds": 2}\n')
    assert read_recorded(log).groups == ((1.0,), (2.0,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"group": 1}\n{"group": 1, "seconds": 3}\n', "line 1: no JSON object"),
        ("[1]\n", "line 1"),
        ('{"group": 1, "seconds": -3}\n', "line 1"),
        ('{"group": 1, "seconds": NaN}\n{"group": 1, "seconds": 3}\n', "line 1"),
        ('{"requests": [{"api_time": 3}]}\n{"group": 1, "seconds": 3}\n', "line 1"),
        ('{"kind": "run.start"}\n', "no execution"),
    ],
)
def test_what_can_not_be_read_is_said(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(GyreError, match=message):
        read_recorded(file)
    with pytest.raises(GyreError, match="No such file"):
        read_recorded(tmp_path / "absent")


def test_the_first_limit_decides_whether_what_is_cut_counts() -> None:
    assert (Limits(harness=2, overall=3).first, Limits(harness=2, overall=3).valid) == (2, True)
    assert (Limits(overall=3).first, Limits(overall=3).valid) == (3, False)


def test_groups_without_a_valid_execution_stay_without(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"group": g, "seconds": 10.0 * (1 + g), "valid": g != 1 or i != 0} for g in (0, 1) for i in (0, 1)]
    lines += [{"group": 2, "seconds": 99.0, "valid": False}] * 2
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_recorded(file)
    assert (found.void, len(found.groups)) == (frozenset({2}), 3)
    for work in (found, replace(found, replay=True)):
        drawn = [(work.skipped(3, group), work.group(3, group, 2)[0] == 99.0) for group in range(30)]
        assert {skipped for skipped, _ in drawn} == {True, False}
        assert all(skipped is void for skipped, void in drawn)
    file.write_text(json.dumps(lines[-1]))
    with pytest.raises(GyreError, match="no execution that may be trained on"):
        read_recorded(file)


def test_a_share_of_groups_is_skipped_whatever_is_drawn_of_them() -> None:
    work = LogNormal(100.0, 0.2, 0.3, skips=0.2)
    assert sum(work.skipped(1, group) for group in range(2000)) == pytest.approx(400, rel=0.2)
    assert [work.skipped(7, g) for g in range(20)] == [replace(work, mean=5.0).skipped(7, g) for g in range(20)]
    assert not any(LogNormal(100.0, 0.2, 0.3).skipped(1, group) for group in range(100))
