"""A recorded run, simulated: its own groups in their own order, its own costs, its own schedule (or another one). What the simulator is
worth shows here."""

from __future__ import annotations

from dataclasses import replace

from cells.events import Mode
from gyre_hpc.simulation.facts import Facts, Ran
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.scenario import Scenario


def replay(facts: Facts, record: bool = False) -> Outcome | None:
    """The run as the simulator has it, time from `Outcome.began` on, the first dispatch; None for facts without a run of one attempt."""
    return simulate(_scenario(facts, facts.ran), record=record) if facts.ran is not None else None


def otherwise(facts: Facts, mode: Mode, streaming: bool, phi: float, mu: int, trainers: int | None = None) -> Outcome:
    """What the same executions, training and costs would have made under another schedule, on the same cells.

    Executions run as many at once as the cells in rollout hold. Raises ValueError for facts without a run, or a schedule that can't work.
    """
    if facts.ran is None:
        raise ValueError("these facts are of no run that can be simulated again")
    schedule = replace(facts.ran.schedule, mode=mode, streaming=streaming, phi=phi, mu=mu, trainers=trainers)
    return simulate(_scenario(replace(facts, workload=facts.work), replace(facts.ran, schedule=schedule, at_once=None)))


def _scenario(facts: Facts, ran: Ran) -> Scenario:
    return Scenario(
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
