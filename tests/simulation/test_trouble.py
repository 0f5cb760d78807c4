from __future__ import annotations

from dataclasses import replace

import pytest

from cells.events import CapacityChanged, Event, Mode, Role, Schedule, Transfer
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation.handover import HandOver, How
from gyre_hpc.simulation.kernel import Simulation, simulate
from gyre_hpc.simulation.paper import paper_122b
from gyre_hpc.simulation.plan import plan, render
from gyre_hpc.simulation.scenario import HOUR, Faults, Scenario, cut
from gyre_hpc.simulation.study import Study, under
from gyre_hpc.simulation.tables import measure, study
from gyre_hpc.simulation.tables import render as table
from gyre_hpc.simulation.trouble import NO_TROUBLE, Trouble, trouble
from gyre_hpc.simulation.workload import Limits, Recorded
from tests.simulation.test_search import FACTS


def test_options_become_seconds_and_one_line() -> None:
    found = trouble(node_mtbf=1000.0, preempt_every=8.0, restart=10.0, survive=False, checkpoint=30.0)
    assert found == Trouble(Faults(1000 * HOUR, 8 * HOUR, 600.0, False), 30.0)
    assert found.words() == (
        "a node fails once in 1000 h, allocations end after 8 h, 10 min to the next attempt, running executions begin again, "
        "a checkpoint takes 30 s"
    )
    assert trouble(0.0, 0.0, 10.0, False, 0.0) == NO_TROUBLE
    assert not NO_TROUBLE.any
    with pytest.raises(ConfigError, match="without a fault; give --node-mtbf"):
        trouble(0.0, 0.0, 10.0, True, 0.0)


def test_a_checkpoint_costs_its_seconds_at_every_step_and_executions_that_survive_save_time() -> None:
    e0 = next(row.scenario for row in paper_122b().rows if row.id == "E0")
    calm = simulate(e0).seconds
    assert calm < simulate(Trouble(checkpoint=60.0).put(e0)).seconds < calm + 2 * 12 * 60
    again = [simulate(trouble(0.0, 8.0, 10.0, survive, 0.0).put(e0)).seconds for survive in (False, True)]
    assert calm < again[1] < again[0]


def test_failures_come_as_often_as_nodes_and_time_say() -> None:
    e0 = next(row.scenario for row in paper_122b().rows if row.id == "E0")
    outcomes = [simulate(trouble(300.0, 0.0, 0.0, True, 0.0).put(e0), seed) for seed in range(12)]
    expected = sum(outcome.seconds / HOUR for outcome in outcomes) * e0.all_nodes / 300.0
    assert sum(outcome.faults for outcome in outcomes) == pytest.approx(expected, rel=0.3)


def paper(row: str) -> Scenario:
    return next(r.scenario for r in paper_122b().rows if r.id == row)


def test_engines_die_as_often_as_the_nodes_that_serve_say_and_end_nothing() -> None:
    a0 = paper("A0")
    outcomes = [simulate(trouble(0.0, 0.0, 10.0, False, 0.0, 10.0).put(a0), seed) for seed in range(2)]
    expected = sum(outcome.seconds / HOUR for outcome in outcomes) * a0.standalone_nodes / 10.0
    assert sum(outcome.deaths for outcome in outcomes) == pytest.approx(expected, rel=0.3)
    assert all(outcome.faults == 0 and len(outcome.steps) == 12 for outcome in outcomes)
    assert simulate(trouble(0.0, 0.0, 10.0, False, 0.0, 20.0, 60.0).put(a0)).seconds > simulate(a0).seconds


class Watched(Simulation):
    """Looks at what the policy is told of capacities, and at the slots behind every transfer to training."""

    told: list[CapacityChanged]
    left = 0

    def _tell(self, event: Event) -> None:
        if isinstance(event, CapacityChanged):
            self.told.append(event)
        super()._tell(event)

    def _transfer(self, decision: Transfer) -> None:
        if decision.to is Role.TRAINING and self.scenario.schedule.mode is not Mode.ASYNC:
            stays = sum(e.room for e in self.fleet.engines if e.open and e.index != decision.cell)
            assert self.policy.waterlevel <= stays, "more executions than slots remain"
            self.left += 1
        super()._transfer(decision)


@pytest.mark.parametrize("row", ["E0", "C2"])
def test_no_cell_leaves_on_the_strength_of_an_engine_that_is_dead(row: str) -> None:
    run = Watched(trouble(0.0, 0.0, 10.0, False, 0.0, 30.0, 30.0).put(paper(row)), 1, False)
    run.told = []
    outcome = run.run()
    assert outcome.deaths >= 5
    assert len(run.told) > outcome.deaths
    assert run.left > 12 / 4
    assert run.policy.schedule.capacity_from[0] <= run.scenario.schedule.capacity_from[0]


@pytest.mark.parametrize("preempt", [0.0, 4.0], ids=["one-attempt", "resumes"])
def test_budgets_go_on_while_an_execution_waits_for_a_slot_that_died(preempt: float) -> None:
    """As live: a supervisor's clock does not stop for a held call."""
    lasted: list[float] = []
    limits = Limits(2.0 * HOUR)
    work = Recorded(tuple((1.9 * HOUR,) * 4 for _ in range(40)), limits=limits)
    one = cut(Schedule((1,), 4, 4, 1.0, 1, 8, mode=Mode.ASYNC), 2, 1, 16.0, 60.0, work, 1)
    run = Simulation(trouble(0.0, preempt, 30.0, preempt > 0, 0.0, 1.5, 120.0).put(one), 0, False)
    run.recorder.execution = lasted.append  # type: ignore[method-assign]
    outcome = run.run()
    assert outcome.deaths
    assert outcome.cut
    assert bool(outcome.faults) == bool(preempt)
    assert max(lasted) <= limits.first + outcome.faults * HOUR / 2 + 1e-6  # which stands between attempts


def test_a_hand_over_under_deaths_computes_again() -> None:
    assert HandOver(How.NIXL, 100.0, 10.0, 50.0, 25.0).again(4, 2) == 4 * 100 / (2 * 25)
    assert HandOver(How.NIXL, 100.0, 10.0, 50.0).again(4, 2) == 0.0


def test_a_table_under_faults_has_the_hours_without_them_and_no_reported_ones() -> None:
    whole = paper_122b()
    small = under(Study(whole.name, whole.title, (), whole.rows[5:6], (), whole.tuned[:1], (), ()), trouble(0.0, 8.0, 10.0, False, 0.0))
    row = measure(small.rows[0], 2).as_dict()
    assert row["reported_hours"] is None
    assert row["faults"] >= 1
    assert row["simulated_hours"] > row["calm_hours"] == measure(whole.rows[5], 2).as_dict()["simulated_hours"]
    text = table(study(small, 1))
    assert "allocations end after 8 h" in text.splitlines()[0]
    assert "without: hours without any of this" in text


def test_a_plan_for_faults_says_what_they_cost_and_leaves_out_what_never_ends() -> None:
    facts = replace(FACTS, expected=Trouble(Faults(preempt_every=400.0, restart=30.0)))
    found = plan(facts, 4, 0.5, 2)
    assert found["trouble"]["faults"] > 0
    assert found["trouble"]["seconds_without"] < found["best"]["seconds"]
    assert "made for: allocations end after 0.111111 h" in render(found)
    assert plan(FACTS, 4, 0.5, 1)["trouble"] is None
