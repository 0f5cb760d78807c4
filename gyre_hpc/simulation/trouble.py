"""What a run may be in for, as options of `gyre simulate` and `gyre plan` say it: failing nodes, allocations that end, checkpoints.

As the live system does it: the failure of any node ends the attempt, the same command continues from the last step's checkpoint, finished
executions are kept, and running ones begin again unless they are said to survive (harnesses that wait at a gateway outside the job).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation.scenario import HOUR, Faults, Scenario


@dataclass(frozen=True)
class Trouble:
    """Faults, and `checkpoint` seconds that each step's checkpoint takes (beside what the scenario's closing costs already)."""

    faults: Faults = field(default_factory=Faults)
    checkpoint: float = 0.0

    @property
    def any(self) -> bool:
        return self != Trouble()

    def put(self, scenario: Scenario) -> Scenario:
        """The scenario with it."""
        return replace(scenario, faults=self.faults, costs=replace(scenario.costs, close=scenario.costs.close + self.checkpoint))

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
        if self.checkpoint:
            found.append(f"a checkpoint takes {self.checkpoint:g} s")
        return ", ".join(found)


NO_TROUBLE = Trouble()


def trouble(node_mtbf: float, preempt_every: float, restart: float, survive: bool, checkpoint: float) -> Trouble:
    """From the options: hours between failures of one node and between ends of an allocation (0: none), minutes to the next attempt,
    seconds of a checkpoint. ConfigError for options that would have no effect."""
    if survive and not (node_mtbf or preempt_every):
        raise ConfigError("--executions-survive without a fault", "give --node-mtbf or --preempt-every")
    faults = Faults(node_mtbf * HOUR, preempt_every * HOUR, restart * 60, survive) if node_mtbf or preempt_every else Faults()
    return Trouble(faults, checkpoint)
