"""What the scheduling policy hears and what it decides; frozen, no clock, no I/O (shared by the controller and the simulator)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate


class Role(Enum):
    """What a cell does now."""

    ROLLOUT = "rollout"
    TRAINING = "training"


class Mode(Enum):
    """Who trains when (cells/policies.py): cell by cell as rollout can spare them, all together, or always the same cells."""

    ELASTIC = "elastic"
    COLOCATE = "colocate"
    ASYNC = "async"


@dataclass(frozen=True)
class Schedule:
    """The rules of one run (qwengyre.md section 2).

    cells K in fixed order, cell 0 the core; `capacity[k]` executions that cell k's engine can hold; B = `groups_per_step`
    groups a step, N = `group_size` executions a group; `phi`, `mu`: outstanding groups at a burst's boundary are topped up to
    (phi + mu) * B; `steps` optimizer steps in all.

    `mode`, and what trains: the first `trainers` cells (None: all). The others stay in rollout for ever: a standalone pool made of
    cells. `standalone_capacity` are slots of a pool beside the cells. `streaming`: complete groups are trained on as they come; without it
    training begins when all groups of the burst are complete. `join_late`: the caller tells what is claimed (`Claimed`), and a step
    stays open for cells that join until all of it is; without it a step is closed as soon as its last group was fed. Nothing is dispatched
    that no step can consume, so the last steps wait for their slowest groups.
    """

    capacity: tuple[int, ...]
    groups_per_step: int
    group_size: int
    phi: float
    mu: int
    steps: int
    standalone_capacity: int = 0
    staleness_bound: int | None = None
    mode: Mode = Mode.ELASTIC
    streaming: bool = True
    trainers: int | None = None
    join_late: bool = False

    @property
    def training_cells(self) -> int:
        """How many cells may ever train; they are the first ones."""
        return len(self.capacity) if self.trainers is None else self.trainers

    @cached_property
    def capacity_from(self) -> tuple[int, ...]:
        """int[K + 1]: slots of cells k .. K - 1, the standalone pool included."""
        return tuple(accumulate(reversed(self.capacity), initial=self.standalone_capacity))[::-1]

    def holding(self, cell: int | None, slots: int) -> Schedule:
        """It with another capacity of one cell, or (None) of the standalone pool; 0: all engines are dead. ValueError for no such cell."""
        if slots < 0 or (cell is not None and not 0 <= cell < len(self.capacity)):
            raise ValueError(f"cell {cell} of {len(self.capacity)} can't hold {slots} executions")
        if cell is None:
            return replace(self, standalone_capacity=slots)
        return replace(self, capacity=(*self.capacity[:cell], slots, *self.capacity[cell + 1 :]))


# -- events -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GroupDispatched:
    """A group was made durable in the ledger; its `size` executions count as dispatched."""

    group: int
    version: int
    size: int


@dataclass(frozen=True)
class ExecutionFinished:
    """One (group, index) is over for good: scored, or given up."""

    group: int


@dataclass(frozen=True)
class GroupComplete:
    """All executions of the group are over. `valid`: how many may be trained on (0: the group is skipped, counted)."""

    group: int
    valid: int


@dataclass(frozen=True)
class TransferDone:
    cell: int
    to: Role


@dataclass(frozen=True)
class TransferFailed:
    """The transfer was undone; the cell is in the role that it had before."""

    cell: int
    to: Role


@dataclass(frozen=True)
class Claimed:
    """The training cells have claimed all work of the first `groups` groups fed to the open step (told with `join_late` only)."""

    step: int
    groups: int


@dataclass(frozen=True)
class StepDone:
    """The optimizer stepped; `step` counts from 1 and equals the weight version it made."""

    step: int


@dataclass(frozen=True)
class Published:
    """Every engine that serves or will serve has `version`."""

    version: int


@dataclass(frozen=True)
class CapacityChanged:
    """The engines of `cell` (None: of the standalone pool) hold `slots` executions from now on: one died, or is back."""

    cell: int | None
    slots: int


@dataclass(frozen=True)
class GroupFrontier:
    """What the ledger knows of one group after a (re)start; `valid` None: not all of its executions are over.

    `version` as it counts for distances: below 0 is possible where weights were given up. `trained` may be set by a caller that knows
    better than the snapshot that the group was consumed already.
    """

    group: int
    version: int
    size: int
    finished: int = 0
    valid: int | None = None
    trained: bool = False


Event = (
    GroupDispatched | ExecutionFinished | GroupComplete | TransferDone | TransferFailed | Claimed | StepDone | Published | CapacityChanged
)


# -- decisions ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dispatch:
    """Dispatch `groups` new groups now, at weight `version`; answered by as many GroupDispatched."""

    groups: int
    version: int


@dataclass(frozen=True)
class Transfer:
    """Move one cell to a role; answered by TransferDone or TransferFailed. Never two at once."""

    cell: int
    to: Role


@dataclass(frozen=True)
class Feed:
    """Give this complete group to the training cells, for the current step."""

    group: int


@dataclass(frozen=True)
class Drop:
    """This complete group is trained on by no step: its bound on the staleness has passed (after a resume that gave up steps only)."""

    group: int


@dataclass(frozen=True)
class CloseStep:
    """No more groups for this step and no more joins: reduce, step, checkpoint; answered by StepDone.

    The step has `groups_per_step` groups, or fewer when skipped ones could not be replaced (cells/policy.py).
    """

    step: int


@dataclass(frozen=True)
class Publish:
    """Give the weights `version` to all engines, at the burst's end; answered by Published."""

    version: int


@dataclass(frozen=True)
class Finish:
    """All steps are done."""


Decision = Dispatch | Transfer | Feed | Drop | CloseStep | Publish | Finish
