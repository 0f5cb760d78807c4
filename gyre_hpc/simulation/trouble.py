"""What a run may be in for, as options of `gyre simulate` and `gyre plan` say it: failing nodes and engines, allocations that end,
checkpoints, hand-overs of KV.

As the live system does it: the failure of any node ends the attempt, the same command continues from the last step's checkpoint, finished
executions are kept, and running ones begin again unless they are said to survive (harnesses that wait at a gateway outside the job). An
engine that dies ends nothing: the policy hears that its slots are gone, and of its return.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation.handover import NO_HAND_OVER, HandOver
from gyre_hpc.simulation.scenario import HOUR, Faults, Scenario


@dataclass(frozen=True)
class Trouble:
    """Faults; `checkpoint` seconds that each step's checkpoint takes (beside what the scenario's closing costs already); `kv`: what moving
    executions costs (beside what its transfers cost already)."""

    faults: Faults = field(default_factory=Faults)
    checkpoint: float = 0.0
    kv: HandOver = NO_HAND_OVER

    @property
    def any(self) -> bool:
        return self != Trouble()

    def put(self, scenario: Scenario) -> Scenario:
        """The scenario with it."""
        return replace(
            scenario, faults=self.faults, costs=replace(scenario.costs, close=scenario.costs.close + self.checkpoint, kv=self.kv)
        )

    def words(self) -> str:
        """One line."""
        found, faults = [], self.faults
        if faults.node_mtbf:
            found.append(f"a node fails once in {faults.node_mtbf / HOUR:g} h")
        if faults.preempt_every:
            found.append(f"allocations end after {faults.preempt_every / HOUR:g} h")
        if found:
            found.append(f"{faults.restart / 60:g} min to the next attempt")
            found.append(f"running executions {'survive' if faults.executions_survive else 'begin again'}")
        if faults.engine_mtbf:
            found.append(f"a node's engine dies once in {faults.engine_mtbf / HOUR:g} h and is back after {faults.engine_start / 60:g} min")
        if self.kv.any:
            found.append(self.kv.words())
        if self.checkpoint:
            found.append(f"a checkpoint takes {self.checkpoint:g} s")
        return ", ".join(found)


NO_TROUBLE = Trouble()


def trouble(
    node_mtbf: float,
    preempt_every: float,
    restart: float,
    survive: bool,
    checkpoint: float,
    engine_mtbf: float = 0.0,
    engine_start: float = 2.0,
    kv: HandOver = NO_HAND_OVER,
) -> Trouble:
    """From the options: hours between failures of one node, between ends of an allocation and between deaths of a node's engine (0: none),
    minutes to the next attempt and to an engine's return, seconds of a checkpoint. ConfigError for options that would have no effect."""
    if survive and not (node_mtbf or preempt_every):
        raise ConfigError("--executions-survive without a fault", "give --node-mtbf or --preempt-every")
    faults = Faults(node_mtbf * HOUR, preempt_every * HOUR, restart * 60, survive) if node_mtbf or preempt_every else Faults()
    if engine_mtbf:
        faults = replace(faults, engine_mtbf=engine_mtbf * HOUR, engine_start=engine_start * 60)
    return Trouble(faults, checkpoint, kv)
