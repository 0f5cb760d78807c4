"""What is simulated: the policy's schedule, the nodes behind its cells, costs, and the workload; frozen, every parameter named.

Units: seconds, and nodes; a cell's rollout capacity is in executions (`Schedule.capacity`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cells.events import Mode, Schedule
from gyre_hpc.simulation.handover import NO_HAND_OVER, HandOver
from gyre_hpc.simulation.workload import Workload

HOUR = 3600.0


@dataclass(frozen=True)
class Costs:
    """What changes cost, in seconds. The transfers' defaults are those that the paper reports (qwengyre.md 2.4)."""

    to_training: float = 8.52
    to_rollout: float = 3.46
    hand_over: float = 0.0
    """That an execution loses when it changes its engine, whatever its context."""
    kv: HandOver = NO_HAND_OVER
    """What moving its context costs beside that."""
    close: float = 0.0
    """Of a step beside its gradients: sum over cells, optimizer, checkpoint."""
    publish: float = 0.0
    grain: float = 0.0
    """For which one micro-step keeps its cell: the cells of a step end up to so much apart, and the last one counts."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong. An attempt that ends goes on from the last step's checkpoint, as the live system does."""

    node_mtbf: float = 0.0
    """Mean seconds between failures of one node; 0: none."""
    preempt_every: float = 0.0
    """Seconds after which an allocation is taken away (a time limit, say); 0: never."""
    restart: float = 600.0
    """Seconds from the end of an attempt until the next one rolls out."""
    executions_survive: bool = False
    """Whether running executions go on after it; without that they begin again."""
    engine_mtbf: float = 0.0
    """Mean seconds between deaths of the engines of one node; 0: none. A death in rollout takes a cell's slots, or one node's of the
    standalone pool; executions go on elsewhere as far as there is room, and the attempt goes on."""
    engine_start: float = 120.0
    """Seconds until an engine that died is back."""


@dataclass(frozen=True)
class Scenario:
    """One run to be simulated. `nodes[k]` of cell k; `standalone_nodes` carry `schedule.standalone_capacity`."""

    schedule: Schedule
    nodes: tuple[int, ...]
    train_group: float
    """Node-seconds of training that one group costs."""
    workload: Workload
    standalone_nodes: int = 0
    beta: float = 0.0
    """An execution on an engine with a share u of its slots in use runs at 1 / (1 + beta u) of its speed."""
    costs: Costs = Costs()
    faults: Faults = Faults()
    window: int | None = None
    """Look at the run until its step `window` is published, as if at a longer one: without it (the whole run) the end counts, where the
    last burst's slowest executions are waited for. It must be the end of a burst, and `schedule.steps` so far beyond it (`beyond`) that
    the policy dispatches as ever."""
    at_once: int | None = None
    """Executions that the supervisors run at once (`harness.slots_per_node` of all nodes); None: as many as the engines hold. Where
    more run than engines hold, their calls share the engines: what an execution waits in its calls is part of its recorded duration."""
    train_groups: tuple[float, ...] = ()
    """What each group costs, in order of dispatch, where that is known (a run that is simulated again); later ones `train_group`."""

    @property
    def all_nodes(self) -> int:
        return sum(self.nodes) + self.standalone_nodes


def most_served(schedule: Schedule) -> int:
    """Executions that the engines hold at most."""
    return schedule.capacity_from[schedule.training_cells if schedule.mode is Mode.ASYNC else 0]


def beyond(schedule: Schedule, steps: int) -> tuple[Schedule, int]:
    """(a schedule so long that its end does not show, the window): at least `steps` steps, up to the end of a burst."""
    window = math.ceil(steps / schedule.mu) * schedule.mu
    return replace(schedule, steps=window + math.ceil(schedule.phi) + 2 * schedule.mu), window


def cut(
    schedule: Schedule,
    nodes: int,
    cells: int,
    slots_per_node: float,
    train_group: float,
    workload: Workload,
    standalone: int = 0,
    beta: float = 0.0,
    costs: Costs | None = None,
) -> Scenario:
    """A scenario of `nodes` nodes: `standalone` of them only roll out, the rest are `cells` equal cells (under async: the trainers).

    Raises ValueError when they can't be cut so.
    """
    inside = nodes - standalone
    if cells < 1 or inside < cells or inside % cells:
        raise ValueError(f"{nodes} nodes less {standalone} standalone ones are not {cells} equal cells")
    if schedule.mode is Mode.ASYNC and standalone < 1:
        raise ValueError("async needs standalone nodes")
    per_cell = inside // cells
    whole = replace(
        schedule,
        capacity=(max(1, round(slots_per_node * per_cell)),) * cells,
        standalone_capacity=max(1, round(slots_per_node * standalone)) if standalone else 0,  # one at least, as a cell
        trainers=None,
    )
    return Scenario(whole, (per_cell,) * cells, train_group, workload, standalone, beta, costs if costs is not None else Costs())
