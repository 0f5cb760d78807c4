"""What each cell is doing, and which change of it is allowed.

Invariants (checked by `Roles.moved`, which is the only way to a new state):
- one function, `predecessors`, knows the allowed changes;
- at most one cell is in transit (transfers are serial);
- the cells in training are a prefix of the cell order: the next to leave rollout is the first that is not in training, the next
  to return is the last that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cells.events import Role


class CellState(Enum):
    """A role, or the way between two."""

    ROLLOUT = "rollout"
    LEAVING = "leaving"
    TRAINING = "training"
    RETURNING = "returning"


_PREDECESSORS = {
    CellState.ROLLOUT: frozenset({CellState.RETURNING, CellState.LEAVING}),
    CellState.LEAVING: frozenset({CellState.ROLLOUT}),
    CellState.TRAINING: frozenset({CellState.LEAVING, CellState.RETURNING}),
    CellState.RETURNING: frozenset({CellState.TRAINING}),
}


def predecessors(state: CellState) -> frozenset[CellState]:
    """The states from which a cell may come to `state`. LEAVING -> ROLLOUT and RETURNING -> TRAINING are transfers undone."""
    return _PREDECESSORS[state]


@dataclass(frozen=True)
class Roles:
    """The states of all cells, in their fixed order."""

    states: tuple[CellState, ...]

    @classmethod
    def all_rollout(cls, cells: int) -> Roles:
        return cls((CellState.ROLLOUT,) * cells)

    @property
    def prefix(self) -> int:
        """How many cells are in training; they are cells 0 .. prefix - 1."""
        return sum(1 for state in self.states if state is CellState.TRAINING)

    @property
    def moving(self) -> int | None:
        """The cell in transit."""
        for cell, state in enumerate(self.states):
            if state in (CellState.LEAVING, CellState.RETURNING):
                return cell
        return None

    @property
    def core_trains(self) -> bool:
        return self.states[0] is CellState.TRAINING

    @property
    def next_to_leave(self) -> int | None:
        """The cell that leaves rollout next, None when all are in training or one is in transit."""
        if self.moving is not None or self.prefix == len(self.states):
            return None
        return self.prefix

    def moved(self, cell: int, state: CellState) -> Roles:
        """The states with `cell` in `state`. ValueError for a change that is not allowed."""
        old = self.states[cell]
        if old not in predecessors(state):
            raise ValueError(f"cell {cell} can't go from {old.value} to {state.value}")
        if state is CellState.LEAVING and cell != self.next_to_leave:
            raise ValueError(f"cell {cell} can't leave rollout: next is {self.next_to_leave}, in transit is {self.moving}")
        if state is CellState.RETURNING and (self.moving is not None or cell != self.prefix - 1):
            raise ValueError(f"cell {cell} can't return: last in training is {self.prefix - 1}, in transit is {self.moving}")
        return Roles((*self.states[:cell], state, *self.states[cell + 1 :]))

    def begin(self, cell: int, to: Role) -> Roles:
        """A transfer of `cell` begins."""
        return self.moved(cell, CellState.LEAVING if to is Role.TRAINING else CellState.RETURNING)

    def end(self, cell: int, to: Role, undone: bool = False) -> Roles:
        """The transfer of `cell` to role `to` is over; `undone`: the cell is where it was before."""
        on_the_way = CellState.LEAVING if to is Role.TRAINING else CellState.RETURNING
        if self.states[cell] is not on_the_way:
            raise ValueError(f"cell {cell} is {self.states[cell].value}: no transfer to {to.value} is under way")
        arrived = CellState.TRAINING if (to is Role.TRAINING) is not undone else CellState.ROLLOUT
        return self.moved(cell, arrived)
