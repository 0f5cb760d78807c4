"""The communicators of one run, built once at start from MPI_COMM_WORLD (qwengyre.md 2.5).

World: rank 0 is the controller and hosts no model; then K cells of R ranks each, in cell order; then S standalone cells of one rank each,
which serve and never train (cells K .. K + S - 1). A cell's first rank is its leader.
- `control`: the controller (rank 0) and the leaders (rank k + 1 leads cell k), standalone ones included;
- `cell`: the ranks of one's own cell; `sums`: the same once more, for sums that some of them may leave before their end, after which
  nothing else may go over it (MPI matches collectives by their order);
- `prefix(k)`, k = 1..K: one communicator for each prefix of k cells and each slot i of a cell: rank i of cells 0..k-1, rank = cell. Cell
  0, the core, is rank 0 in each. What is reduced between cells is reduced slot by slot. Standalone cells are in none.

Invariant: a role transfer never creates or frees a communicator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


class WorldMismatch(Exception):
    """MPI_COMM_WORLD has another size than the run needs."""


@dataclass(frozen=True)
class Layout:
    """Which rank is what: `cells` cells of `ranks_per_cell` ranks behind the controller, then `standalone` cells of one rank."""

    cells: int
    ranks_per_cell: int = 1
    standalone: int = 0

    @property
    def all_cells(self) -> int:
        """Cells that have engines: those that may train, and the standalone ones behind them."""
        return self.cells + self.standalone

    @property
    def world_size(self) -> int:
        return self._first_standalone + self.standalone

    @property
    def _first_standalone(self) -> int:
        return 1 + self.cells * self.ranks_per_cell

    def is_standalone(self, cell: int) -> bool:
        """Whether a cell only ever serves."""
        return cell >= self.cells

    def cell_of(self, rank: int) -> int | None:
        """The cell of a world rank, None for the controller."""
        if rank >= self._first_standalone:
            return self.cells + rank - self._first_standalone
        return None if rank == 0 else (rank - 1) // self.ranks_per_cell

    def slot_of(self, rank: int) -> int | None:
        """A world rank's place inside its cell; 0 is the leader."""
        if rank >= self._first_standalone:
            return 0
        return None if rank == 0 else (rank - 1) % self.ranks_per_cell

    def ranks_of(self, cell: int) -> list[int]:
        if self.is_standalone(cell):
            return [self._first_standalone + cell - self.cells]
        first = 1 + cell * self.ranks_per_cell
        return list(range(first, first + self.ranks_per_cell))

    def control_ranks(self) -> list[int]:
        return [0, *(self.ranks_of(cell)[0] for cell in range(self.all_cells))]

    def prefix_ranks(self, cells: int, slot: int) -> list[int]:
        return [self.ranks_of(cell)[slot] for cell in range(cells)]


def check_world(size: int, layout: Layout, environ: Mapping[str, str] | None = None) -> None:
    """WorldMismatch, with the remedy, unless `size` is what the layout needs.

    The trap: an MPI library that does not speak srun's PMI starts N worlds of one rank each, without a word.
    """
    if size == layout.world_size:
        return
    tasks = (environ if environ is not None else os.environ).get("SLURM_STEP_NUM_TASKS")
    pool = f" + {layout.standalone} standalone" if layout.standalone else ""
    need = f"{layout.world_size} (1 controller + {layout.cells} cells x {layout.ranks_per_cell}{pool})"
    if size == 1 and tasks not in (None, "1"):
        raise WorldMismatch(
            f"MPI_COMM_WORLD has 1 rank in a Slurm step of {tasks} tasks, needs {need}: the MPI library does not speak this step's PMI; "
            "start it with `srun --mpi=pmi2` and the mpich wheel, and see `gyre doctor`"
        )
    seen = f" in a Slurm step of {tasks} tasks" if tasks is not None else ""
    raise WorldMismatch(f"MPI_COMM_WORLD has {size} ranks{seen}, needs {need}; start as many ranks, or change cells.count")


@dataclass(frozen=True)
class Communicators:
    """One rank's communicators. `control` is None for ranks that lead nothing; `cell`, `cell_index`, `slot` for the controller."""

    layout: Layout
    world: MPI.Intracomm
    control: MPI.Intracomm | None
    cell: MPI.Intracomm | None
    cell_index: int | None
    slot: int | None
    prefixes: tuple[MPI.Intracomm | None, ...]
    sums: MPI.Intracomm | None = None

    @property
    def is_leader(self) -> bool:
        return self.slot == 0

    def prefix(self, cells: int) -> MPI.Intracomm:
        """The communicator over cells 0..cells-1 for this rank's slot. ValueError when this rank is in none of them."""
        comm = self.prefixes[cells - 1] if 1 <= cells <= self.layout.cells else None
        if comm is None:
            raise ValueError(f"rank {self.world.Get_rank()} (cell {self.cell_index}) is not in a prefix of {cells} cells")
        return comm


def build(layout: Layout, world: MPI.Intracomm | None = None) -> Communicators:
    """Collective over the world. Raises WorldMismatch before anything collective happens."""
    if world is None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    check_world(world.Get_size(), layout)
    rank = world.Get_rank()
    cell, slot = layout.cell_of(rank), layout.slot_of(rank)
    control = _subset(world, layout.control_ranks(), tag=1)
    own = _subset(world, layout.ranks_of(cell), tag=2) if cell is not None else None
    # every rank goes through its groups in the same order (k upwards), so no two creations can wait for each other
    prefixes: list[MPI.Intracomm | None] = []
    for k in range(1, layout.cells + 1):
        trains = cell is not None and not layout.is_standalone(cell)
        prefixes.append(_subset(world, layout.prefix_ranks(k, slot), tag=2 + k) if trains and slot is not None else None)
    sums = _subset(world, layout.ranks_of(cell), tag=3 + layout.cells) if cell is not None else None
    return Communicators(layout, world, control, own, cell, slot, tuple(prefixes), sums)


def _subset(world: MPI.Intracomm, ranks: list[int], tag: int) -> MPI.Intracomm | None:
    """A communicator over `ranks`, created by those alone; None for the others."""
    if world.Get_rank() not in ranks:
        return None
    group = world.Get_group().Incl(ranks)
    try:
        return world.Create_group(group, tag)
    finally:
        group.Free()
