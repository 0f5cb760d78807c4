"""A recorded run, simulated: its own groups in their own order, its own costs, its own schedule. What the simulator is worth shows here."""

from __future__ import annotations

from dataclasses import replace

from gyre_hpc.simulation.facts import Facts
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.scenario import Scenario


def replay(facts: Facts, record: bool = False) -> Outcome | None:
    """The run as the simulator has it, from the first dispatch on; None for facts without a run of one attempt."""
    ran = facts.ran
    if ran is None:
        return None
    scenario = Scenario(
        ran.schedule,
        (ran.nodes_per_cell,) * len(ran.schedule.capacity),
        facts.train_group,
        replace(facts.workload, replay=True),
        standalone_nodes=ran.standalone_nodes,
        beta=facts.beta,
        costs=facts.costs,
        at_once=ran.at_once,
        train_groups=ran.train_groups,
    )
    return simulate(scenario, record=record)
