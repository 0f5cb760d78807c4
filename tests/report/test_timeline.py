"""Pictures of what cells did over time: each bar where there is room for it, else columns that share the time as the states did."""

from __future__ import annotations

import re

import pytest

from gyre_hpc.report import roles, timeline
from gyre_hpc.report.summary import Summary, summarise


def row(name: str, changes: int, share: float) -> timeline.Row:
    """100 s of rollout and training in turn, `changes` times; training has `share` of each turn."""
    turn = 100.0 / changes
    bars: list[timeline.Bar] = []
    for start in (turn * i for i in range(changes)):
        middle = start + turn * (1 - share)
        bars += [(start, middle, "blue", "rollout"), (middle, start + turn, "pink", "training")]
    return name, bars


def heights(picture: str, colour: str) -> list[float]:
    """Heights of the edges of one colour's areas, as shares of a row that is 22 units high."""
    found = re.findall(rf'd="M64 ([\d.]+)([^"]*)Z" fill="var\(--{colour}\)"', picture)
    return [(float(bottom) - float(edge)) / 22 for bottom, path in found for edge in re.findall(r"V([\d.]+)", path)]


def test_a_few_bars_are_drawn_each() -> None:
    picture = timeline.gantt([row("a", 10, 0.25)], 100.0)
    assert picture.count("<rect") == 20
    assert "<path" not in picture


def test_many_bars_become_columns_that_share_the_time() -> None:
    picture = timeline.gantt([row("a", 5200, 0.25)], 100.0, names={"pink": "training", "blue": "rollout"})
    assert "<rect" not in picture
    assert "<title>a: training 25%, rollout 75%</title>" in picture
    training = [height for height in heights(picture, "pink") if height]
    assert training == pytest.approx([0.25] * len(training), abs=0.01)
    assert max(heights(picture, "blue")) == pytest.approx(1.0, abs=0.01)
    assert len(picture) < 20_000


def test_columns_end_where_they_are_told_to() -> None:
    """Training in the second half of every step, whatever a step's length: a column a step shows half and half."""
    ends = [10.0 * i + 3.0 * (i % 2) for i in range(1, 101)]
    bars: list[timeline.Bar] = []
    for start, end in zip([0.0, *ends], ends, strict=False):
        bars += [(start, (start + end) / 2, "blue", "rollout"), ((start + end) / 2, end, "pink", "training")]
    picture = timeline.gantt([("a", bars)], ends[-1], cuts=ends)
    assert heights(picture, "pink") == pytest.approx([0.5, 0.0], abs=0.01)  # one flat edge, and the end of it
    beating = timeline.gantt([("a", bars)], ends[-1])
    assert len(heights(beating, "pink")) > 100


def test_a_row_for_all_is_their_mean_those_that_are_not_drawn_included() -> None:
    rows = [row("a", 200, 0.1), row("b", 200, 0.3), row("c", 200, 0.8)]
    picture = timeline.gantt(rows, 100.0, names={"pink": "training", "blue": "rollout"}, together="all", most=2)
    titles = re.findall("<title>(.*?)</title>", picture)
    assert titles == ["all: training 40%, rollout 60%", "a: training 10%, rollout 90%", "b: training 30%, rollout 70%"]


def test_the_rows_of_many_cells_are_low() -> None:
    def height(cells: int) -> int:
        (found,) = re.findall(r'viewBox="0 0 860 (\d+)"', timeline.gantt([row(str(i), 1, 0.5) for i in range(cells)], 100.0))
        return int(found)

    assert height(20) == 42 + 20 * 30
    assert height(64) == 42 + 64 * 15


@pytest.mark.parametrize(
    ("count", "most", "each"), [(0, 5, 1), (5, 5, 1), (18, 18, 1), (24, 18, 2), (40, 18, 5), (500, 18, 50), (5000, 18, 500)]
)
def test_some_of_many_numbers_are_shown(count: int, most: int, each: int) -> None:
    assert timeline.every(count, most) == each


def test_numbers_do_not_stand_on_one_another() -> None:
    picture = timeline.gantt([row("a", 1, 0.5)], 100.0, numbers=[(50.0, "100"), (51.0, "101"), (60.0, "102")])
    assert [f">{number}<" in picture for number in (100, 101, 102)] == [True, False, True]


def test_standalone_nodes_roll_out_whenever_they_are_not_starting() -> None:
    name, bars = timeline.pool_row(2, 100.0, [(0.0, 10.0, "starting"), (50.0, 60.0, "starting")])
    assert name == "pool ×2"
    assert [(start, end, colour) for start, end, colour, _ in bars] == [
        (0.0, 10.0, "grey"),
        (10.0, 50.0, "blue"),
        (50.0, 60.0, "grey"),
        (60.0, 100.0, "blue"),
    ]


def long_run(cells: int, steps: int, pause: float) -> Summary:
    """Every cell trains in the second half of every step of 10 s; a second attempt begins `pause` seconds after half of the steps."""
    events: list[dict[str, object]] = [{"t": 0.0, "kind": "run.start", "cells": [["n"]] * cells}, {"t": 0.0, "kind": "engines"}]
    now = 0.0
    for step in range(1, steps + 1):
        if step == steps // 2 + 1:
            now += pause
            events += [{"t": now, "kind": "run.start", "cells": [["n"]] * cells}, {"t": now, "kind": "engines"}]
        for at, here, there in ((5.0, "rollout", "training"), (10.0, "training", "rollout")):
            change = {"kind": "transfer", "from": here, "to": there, "seconds": 0.0, "live": 1}
            events += [{"t": now + at, "cell": cell, **change} for cell in range(cells)]
        now += 10.0
        events.append({"t": now, "kind": "step.end", "step": step, "score_mean": 0.5, "loss": 0.0, "staleness_mean": 0.0})
    return summarise(events)


def test_a_long_run_is_drawn_whole_and_its_last_steps_once_more() -> None:
    page = roles.draw(long_run(12, 100, pause=50_000.0))
    assert page.count("<svg") == 2
    assert "50000 s between attempts, when nothing ran, are left out." in page
    assert "in every step the colours share" in page
    assert "The last 4 of these steps:" in page
    assert "seconds since the end of step 96" in page
    first, last = page.split("The last 4 of these steps:")
    assert first.count("<rect") == 0
    assert len(re.findall("<title>[^<]*training 50%", first)) == 13
    assert last.count("training: ") == 12 * 4
    assert ">10<" in first
    assert ">15<" not in first
    assert "seconds that the run ran" in first


def test_a_short_run_shows_every_step() -> None:
    page = roles.draw(long_run(2, 5, pause=0.0))
    assert page.count("<svg") == 1
    assert "all cells" not in page
    assert [f">{step}<" in page for step in range(1, 6)] == [True] * 5
    assert page.count("<title>step ") == 5
