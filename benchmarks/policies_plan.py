"""What benchmarks/policies.py runs: the schedules that it compares, one run's folder, and the configuration of a run.

Invariant: the runs of a seed differ in `schedule.*`, in how nodes make cells, and in what follows from both: as many executions run at
once as the nodes in rollout hold (`harness.slots_per_node`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gyre_hpc.configfile import load
from gyre_hpc.errors import GyreError

JOB = Path(__file__).with_name("policies.yaml")
ROW_SECONDS = 0.7
"""Emulated device time of a trained row: training is then to rollout about what it is in the paper's 122B case."""

ROW_TOKENS = 100
"""More than most rows have: a micro-step of a cell of several nodes has about a row for each."""


@dataclass(frozen=True)
class Schedule:
    """What one policy sets; `trainers` None: all cells may train."""

    mode: str
    streaming: bool
    phi: float
    mu: int
    trainers: int | None = None
    cells: int = 6
    nodes_per_cell: int = 1
    standalone: int = 0

    @property
    def nodes(self) -> int:
        return self.cells * self.nodes_per_cell + self.standalone

    @property
    def serving(self) -> int:
        """Nodes that hold executions at a burst's beginning."""
        return self.nodes - (self.trainers or self.cells) * self.nodes_per_cell if self.mode == "async" else self.nodes


SCHEDULES: Mapping[str, Schedule] = {
    "elastic": Schedule("elastic", True, 0.5, 3),
    "async+streaming 3": Schedule("async", True, 1.5, 1, 3),
    "colocate": Schedule("colocate", False, 0.0, 4),
    "async 3": Schedule("async", False, 1.5, 1, 3),
    "async+streaming 4": Schedule("async", True, 1.5, 1, 4),
    "async+streaming 2": Schedule("async", True, 1.5, 1, 2),
}
"""In the order in which they run: neighbours take about as long. Async with its number of trainers, of six cells (1 and 5 take twice the
time, says the simulator)."""
ONCE = ("async+streaming 4",)


@dataclass(frozen=True)
class Task:
    """One run to be made."""

    name: str
    schedule: Schedule
    seed: int
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}-seed{self.seed}"

    @property
    def cores(self) -> Path:
        """There when the run is done: the cores' idle share while it went on."""
        return self.folder / f"{self.run.name}.cores.json"


def plan(names: Sequence[str], schedules: Mapping[str, Schedule], seeds: int, folder: Path) -> list[Task]:
    """The runs, neighbours of about one length; a split that is far from the best is run with the first seed only."""
    return [Task(name, schedules[name], seed, folder) for seed in range(seeds) for name in names if seed == 0 or name not in ONCE]


def write_config(task: Task, job: Path, steps: int) -> Path:
    """The run's configuration: the job's, with this schedule, these cells and this seed. Raises GyreError for places that don't come out
    even."""
    schedule, places = task.schedule, load(job).rollout.capacity
    held = schedule.serving * places
    if held % schedule.nodes:
        raise GyreError(f"{task.name}: {held} places don't spread evenly over {schedule.nodes} nodes", f"change rollout.capacity in {job}")
    chosen: dict[str, Any] = {"mode": schedule.mode, "streaming": schedule.streaming, "phi": schedule.phi, "mu": schedule.mu}
    if schedule.trainers is not None:
        chosen["trainers"] = schedule.trainers
    tree: dict[str, Any] = {
        "extends": str(job),
        "run": {"name": task.run.name, "dir": str(task.run), "seed": task.seed, "steps": steps},
        "tasks": {"seed": task.seed},
        "harness": {"slots_per_node": held // schedule.nodes},
        "cells": {"count": schedule.cells, "nodes_per_cell": schedule.nodes_per_cell, "standalone": schedule.standalone},
        "rollout": {"engines_per_cell": schedule.nodes_per_cell},
        "schedule": chosen,
    }
    if schedule.nodes_per_cell > 1:
        tree["training"] = {"tokens_per_microstep": ROW_TOKENS * schedule.nodes_per_cell}
    file = task.folder / f"{task.run.name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
