from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import yaml

from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.report.summary import summarise
from gyre_hpc.simulation import plan as planning
from gyre_hpc.simulation import search as searching
from gyre_hpc.simulation.facts import Facts
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.picture import MOST_CELLS, draw, draw_run
from gyre_hpc.simulation.scenario import Costs
from gyre_hpc.simulation.search import Candidate, candidates, search, slopes
from gyre_hpc.simulation.workload import LogNormal, Recorded

FACTS = Facts(
    workload=Recorded(tuple(tuple(LogNormal(100.0, 0.2, 0.4).group(5, g, 4)) for g in range(60))),
    groups_per_step=4,
    group_size=4,
    steps=6,
    slots_per_node=4.0,
    train_group=60.0,
    smallest_cell=1,
    costs=Costs(to_training=1.0, to_rollout=1.0),
    origin="a test",
)


def test_candidates_use_every_node_and_keep_the_staleness() -> None:
    found = candidates(12, 2, 1.5)
    assert len(found) == len(set(found))
    assert {c.mode for c in found} == {"elastic", "colocate", "async"}
    for c in found:
        assert c.cells * c.nodes_per_cell + c.standalone == 12
        assert c.nodes_per_cell % 2 == 0
        assert c.phi + (c.mu - 1) / 2 <= 1.5
        assert c.mode != "async" or c.standalone > 0
    assert {c.mu for c in found} == {1, 2, 3, 4}
    assert {c.mu for c in candidates(12, 2, 0.0)} == {1}
    assert all(c.standalone % 4 == 1 for c in candidates(9, 4, 0.0))  # what makes no cell only rolls out
    assert max(c.nodes_per_cell for c in candidates(10**9, 1, 0.0) if c.mode == "elastic") == 8  # memory doesn't grow with the nodes
    with pytest.raises(ConfigError, match="3 nodes don't hold one cell of 4"):
        candidates(3, 4, 1.5)


def test_nodes_that_hold_less_than_one_execution_each_can_be_planned_for() -> None:
    tried, _ = search(replace(FACTS, slots_per_node=0.1, steps=2), 2, 0.0, 1)
    assert {t.candidate.mode for t in tried} == {"elastic", "colocate", "async"}


def test_the_best_is_told_as_a_configuration() -> None:
    elastic = Candidate("elastic", 6, 4, 7, 0.5, 3).overrides(2)
    assert elastic == [
        "cells.count=6", "cells.nodes_per_cell=4", "cells.standalone=7", "schedule.mode=elastic", "schedule.phi=0.5", "schedule.mu=3",
        "schedule.trainers=null", "schedule.join_late=true", "schedule.streaming=true", "schedule.shuffle=false",
    ]  # fmt: skip
    pools = Candidate("async", 1, 12, 20, 1.5, 1).overrides(4)
    assert {"cells.count=3", "cells.nodes_per_cell=4", "cells.standalone=20"} <= set(pools)
    assert "cells.standalone=0" in Candidate("colocate", 1, 8, 0, 0.0, 4).overrides(4)
    for overrides in (elastic, pools):
        check_overrides(overrides)


def check_overrides(overrides: list[str]) -> None:
    """They make a configuration."""
    tree: dict[str, dict[str, object]] = {}
    for key, value in (item.split("=") for item in overrides):
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = yaml.safe_load(value)
    check({"run": {"name": "planned"}, **tree}, "test")


def test_the_search_finds_what_trying_everything_finds() -> None:
    finalists, searched = search(FACTS, 4, 0.5, seeds=3)
    everything = candidates(4, 1, 0.5)
    assert searched == len(everything)
    hours = {c: sum(simulate(c.scenario(FACTS, 6), s).seconds for s in range(3)) / 3 for c in everything}
    assert finalists[0].seconds <= 1.01 * min(hours.values())
    assert finalists[0].seconds == pytest.approx(hours[finalists[0].candidate])
    assert [t.seconds for t in finalists] == sorted(t.seconds for t in finalists)
    assert {t.candidate.mode for t in finalists} == {"elastic", "colocate", "async"}


def test_more_cells_than_executions_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"1000000 nodes are 500000 cells of 2, and no schedule has more than 64 executions .* --nodes 128"
    ):
        search(replace(FACTS, smallest_cell=2), 1_000_000, 1.5, 1)


def test_a_search_that_is_too_long_is_thinned_and_one_that_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, told = replace(FACTS, steps=2), list[str]()
    everything = candidates(4, 1, 1.5)
    each = 2 * 16 + 2 * 4 * 2  # executions, and transfers of 4 cells
    monkeypatch.setattr(searching, "MOST", 20 * each)
    tried, searched = search(facts, 4, 1.5, 4, told.append)
    assert searching.FEWEST <= searched < len(everything) / 2
    assert {len(one.outcomes) for one in tried} <= {1, 2, 3, 4}
    assert {one.candidate.mode for one in tried} == {"elastic", "colocate", "async"}
    assert told[0] == f"0 of {searched} candidates, 2 steps, 1 seed"
    monkeypatch.setattr(searching, "MOST", 3 * each)
    with pytest.raises(ConfigError, match=rf"2 steps of 4 x 4 executions, {len(everything)} candidates: that is too much"):
        search(facts, 4, 1.5, 4)
    monkeypatch.setattr(searching, "MOST", 40 * 12 * each)
    with pytest.raises(ConfigError, match=r"20000 steps of 4 x 4 executions, 9 finalists: that is too much"):
        search(replace(facts, steps=20_000), 4, 1.5, 4)


@pytest.mark.parametrize("part", [2, 3, 5, 6, 15])
def test_what_is_left_of_a_search_that_is_thinned_has_every_setting_and_mode(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Not of each cut the same few, where the settings are a multiple of the part that is left out."""
    everything = candidates(64, 1, 1.5)
    whole = searching._cost(everything, FACTS, 6)
    monkeypatch.setattr(searching, "MOST", whole // part)
    left = searching._thinned(everything, FACTS, 6)
    assert searching._cost(left, FACTS, 6) <= whole // part
    assert {(c.phi, c.mu) for c in left} == {(c.phi, c.mu) for c in everything}
    assert {c.mode for c in left} == {"elastic", "colocate", "async"}


def test_a_bound_on_the_staleness_of_every_group_is_kept() -> None:
    bounded = replace(FACTS, steps=4, staleness_bound=1)
    finalists, searched = search(bounded, 2, 1.0, seeds=1)
    assert 0 < searched < len(candidates(2, 1, 1.0))
    assert max(one.candidate.mu for one in finalists) <= 2
    assert max(outcome.staleness_max for one in finalists for outcome in one.outcomes) <= 1
    three = Candidate("elastic", 2, 1, 0, 0.0, 3)
    assert simulate(three.scenario(replace(bounded, staleness_bound=None), 4)).staleness_max == 2


def test_a_plan_is_text_and_json_and_a_picture() -> None:
    found = planning.plan(FACTS, 4, 0.5, 2)
    json.dumps(found)
    best, other = found["best"], found["runner_up"]
    assert other["seconds"] >= best["seconds"]
    assert best["bound_seconds"] < best["seconds"]
    assert best["over_bound"] == pytest.approx(best["seconds"] / best["bound_seconds"] - 1, abs=1e-3)
    text = planning.render(found)
    for word in ("a test: 240 executions", "best: ", "runner-up", "the best of each mode", "above the bound"):
        assert word in text
    assert "assumed" not in text
    lines = planning.render(planning.plan(replace(FACTS, assumed=frozenset({"beta", "steps"})), 4, 0.5, 1)).splitlines()
    assert lines[-2:] == ["assumed, for neither tells:", f"  beta {FACTS.beta:g}, steps {FACTS.steps}"]
    assert "steps" not in lines[-4]
    scenario = planning.best_candidate(found).scenario(FACTS, 6)
    svg = ElementTree.fromstring(draw(simulate(scenario, record=True), scenario.standalone_nodes))
    titles = [title.text or "" for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("training from") for title in titles)
    assert sum(title.startswith("step ") for title in titles) == 6


def test_a_picture_of_a_real_run_begins_shortly_before_its_first_transfer() -> None:
    events: list[dict[str, object]] = [
        {"t": 1000.0, "kind": "run.start", "attempt": 1, "cells": [["a"], ["b"]]},
        {"t": 1052.0, "kind": "transfer", "cell": 0, "from": "rollout", "to": "training", "seconds": 2.0},
        {"t": 1060.0, "kind": "step.end", "step": 1, "groups": [0]},
    ]
    svg = ElementTree.fromstring(draw_run(summarise(events), zero=1000.0))
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "step 1",
        "rollout from 0.00 to 5.00",
        "transfer from 5.00 to 7.00",
        "training from 7.00 to 15.00",
        "rollout from 0.00 to 15.00",
    ]


def test_a_picture_of_many_cells_shows_the_first() -> None:
    many = Candidate("elastic", 60, 1, 0, 0.0, 1).scenario(FACTS, 1)
    assert draw(simulate(many, record=True)).count(">cell ") == MOST_CELLS


def test_a_cliff_is_where_a_few_slots_cost_a_second_wave() -> None:
    even = replace(FACTS, workload=Recorded(((100.0,) * 4,)), train_group=1.0)
    cut = Candidate("colocate", 1, 4, 0, 0.0, 1)  # 16 executions on 16 slots: with any fewer, two waves
    around = slopes(cut, even, 1)
    cliff = planning._cliff(around)
    assert cliff is not None
    assert (cliff["to_scale"], cliff["from_scale"]) == (0.95, 0.975)  # 15.6 slots are rounded to 16
    assert cliff["longer"] > 0.8
    roomy = slopes(cut, replace(even, slots_per_node=40.0), 1)
    assert planning._cliff(roomy) is None


def test_hours_that_go_with_the_slots_are_no_cliff() -> None:
    assert planning._cliff([(0.9, 111.0), (1.0, 100.0), (1.1, 91.0)]) is None
    assert planning._cliff([(0.95, 120.0), (1.0, 100.0)]) == {"from_scale": 1.0, "to_scale": 0.95, "longer": 0.2, "steepness": 3.8}
