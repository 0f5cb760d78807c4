"""The paper's eight configurations (A0, A3, C0, C1, C2, E0, E1, E2) as small real runs: what they set, cut down to eight nodes.

Source of every row is its file in configs/paper: mode, streaming, (phi, mu) are taken as they are; a node here stands for four of its
nodes. Where that leaves no whole node (the 18 + 14 of async) the trainers' part is rounded down: 4 + 4.

Invariant: all rows have the same nodes, places on them, batch, tasks and number of steps; they differ in the schedule and in how nodes make
cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.policies_plan import Schedule
from gyre_hpc.configfile import load

PAPER = Path(__file__).parents[1] / "configs" / "paper"
JOB = Path(__file__).with_suffix(".yaml")
ROW_SECONDS = 0.75
"""Emulated device time of a trained row: rollout to training is then about 3 to 2, as in the paper's 122B case."""
FEWER = 4
"""Nodes of the paper that one node here stands for."""


def rows() -> Mapping[str, Schedule]:
    """Every row's schedule and cells, in the order of their names."""
    return {file.stem: shrunk(file) for file in sorted(PAPER.glob("[ACE][0-9].yaml"))}


def shrunk(file: Path) -> Schedule:
    """One row on a quarter of its nodes."""
    config = load(file)
    cells, schedule = config.cells, config.schedule
    nodes = (cells.count * cells.nodes_per_cell + cells.standalone) // FEWER
    width = max(1, cells.nodes_per_cell // FEWER)
    count = cells.count * cells.nodes_per_cell // (FEWER * width)
    return Schedule(
        schedule.mode,
        schedule.streaming,
        schedule.phi,
        schedule.mu,
        schedule.trainers,
        cells=count,
        nodes_per_cell=width,
        standalone=nodes - count * width,
    )
