"""What each cell is doing, and which change of it is allowed.

Invariants (checked by `Roles.moved`, which is the only way to a new state):
- one function, `predecessors`, knows the allowed changes;
- at most one cell is in transit (transfers are serial);
- the cells in training are a prefix of the cell order: the next to leave rollout is the first that is not in training, the next
  to return is the last that is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The states of all cells, in their fixed order; constant in size: the prefix, and what the cell behind it does."""

    cells: int
    prefix: int = 0
    """How many cells are in training; they are cells 0 .. prefix - 1."""
    transit: CellState | None = None
    """LEAVING or RETURNING: of cell `prefix`."""

    @classmethod
    def all_rollout(cls, cells: int) -> Roles:
        return cls(cells)

    @classmethod
    def of(cls, states: Sequence[CellState]) -> Roles:
        """From one state a cell. ValueError unless training is a prefix and one cell at most, the next, is in transit."""
        prefix = next((k for k, state in enumerate(states) if state is not CellState.TRAINING), len(states))
        behind = states[prefix] if prefix < len(states) else CellState.ROLLOUT
        found = cls(len(states), prefix, None if behind is CellState.ROLLOUT else behind)
        if found.states != tuple(states):
            raise ValueError(f"{[state.value for state in states]}: training is no prefix, or several cells are in transit")
        return found

    @property
    def states(self) -> tuple[CellState, ...]:
        """One state a cell."""
        behind = self.cells - self.prefix
        middle = () if self.transit is None else (self.transit,)
        return (CellState.TRAINING,) * self.prefix + middle + (CellState.ROLLOUT,) * (behind - len(middle))

    def state(self, cell: int) -> CellState:
        """The state of one cell."""
        if cell < self.prefix:
            return CellState.TRAINING
        return self.transit if cell == self.prefix and self.transit is not None else CellState.ROLLOUT

    @property
    def moving(self) -> int | None:
        """The cell in transit."""
        return None if self.transit is None else self.prefix

    @property
    def serving(self) -> int:
        """The first cell in rollout; all behind it are, too."""
        return self.prefix + (self.transit is not None)

    @property
    def core_trains(self) -> bool:
        return self.prefix > 0

    @property
    def next_to_leave(self) -> int | None:
        """The cell that leaves rollout next, None when all are in training or one is in transit."""
        if self.transit is not None or self.prefix == self.cells:
            return None
        return self.prefix

    def moved(self, cell: int, state: CellState) -> Roles:
        """The states with `cell` in `state`. ValueError for a change that is not allowed."""
        old = self.state(cell)
        if old not in predecessors(state):
            raise ValueError(f"cell {cell} can't go from {old.value} to {state.value}")
        if state is CellState.LEAVING:
            if cell != self.next_to_leave:
                raise ValueError(f"cell {cell} can't leave rollout: next is {self.next_to_leave}, in transit is {self.moving}")
            return Roles(self.cells, self.prefix, state)
        if state is CellState.RETURNING:
            if self.moving is not None or cell != self.prefix - 1:
                raise ValueError(f"cell {cell} can't return: last in training is {self.prefix - 1}, in transit is {self.moving}")
            return Roles(self.cells, self.prefix - 1, state)
        return Roles(self.cells, self.prefix + (state is CellState.TRAINING))

    def begin(self, cell: int, to: Role) -> Roles:
        """A transfer of `cell` begins."""
        return self.moved(cell, CellState.LEAVING if to is Role.TRAINING else CellState.RETURNING)

    def end(self, cell: int, to: Role, undone: bool = False) -> Roles:
        """The transfer of `cell` to role `to` is over; `undone`: the cell is where it was before."""
        on_the_way = CellState.LEAVING if to is Role.TRAINING else CellState.RETURNING
        if self.state(cell) is not on_the_way:
            raise ValueError(f"cell {cell} is {self.state(cell).value}: no transfer to {to.value} is under way")
        arrived = CellState.TRAINING if (to is Role.TRAINING) is not undone else CellState.ROLLOUT
        return self.moved(cell, arrived)
