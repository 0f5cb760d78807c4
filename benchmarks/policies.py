"""Elastic against its baselines, on this machine: wall time of real runs on a virtual Slurm cluster, and what the simulator says of each.

    python -m benchmarks.policies [--seeds 3] [--steps 12] [--beside 2] [--only elastic,colocate] [--pictures DIR] [--json FILE]
    python -m benchmarks.policies --again DIR          (no run: what an earlier call left in DIR)

Runs that are done are not made again: the same command goes on where one was stopped.

One run after the other, `--beside` at a time, each an sbatch job of its own: driver, gateway, a supervisor a node, MPI ranks by
srun, an engine a cell, the built-in model. The job is benchmarks/policies.yaml; the runs of a seed differ in `schedule.*` and in what
follows from it: all aim at the same mean staleness, phi + (mu - 1) / 2 = 1.5 updates, with the (phi, mu) of the paper's rows; and only
as many executions run as the cells in rollout hold (`harness.slots_per_node`; fewer under async), for calls alone don't fill an engine
while executions sleep.

What is emulated, and said in the output: tool time (the bundled harness's own long-tailed sleep), and the device time of a trained row
(benchmarks/policies_job.py), because two cores can't be six devices. The cores' idle share tells whether they are the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.policies_cores import Cores
from benchmarks.policies_job import MODULE
from benchmarks.policies_measure import Measured, measure
from benchmarks.policies_table import as_dict, draw_pictures, render
from cells.events import Mode
from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.facts import Given, gather
from gyre_hpc.simulation.replay import otherwise
from tests.slurm.cluster import Cluster, Spec, cluster

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_suffix(".yaml")
ROW_SECONDS = 0.35
"""Emulated device time of a trained row: training is then to rollout about what it is in the paper's 122B case."""
LONGEST = 900.0


@dataclass(frozen=True)
class Schedule:
    """What one policy sets; `trainers` None: all cells may train."""

    mode: str
    streaming: bool
    phi: float
    mu: int
    trainers: int | None = None

    def serving(self, cells: int) -> int:
        """Cells that hold executions at a burst's beginning."""
        return cells - self.trainers if self.mode == "async" and self.trainers else cells


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
    seed: int
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}-seed{self.seed}"

    @property
    def cores(self) -> Path:
        """There when the run is done: the cores' idle share while it went on."""
        return self.folder / f"{self.run.name}.cores.json"


def write_config(task: Task, steps: int) -> Path:
    """The run's configuration: the job's, with this schedule and seed."""
    schedule = SCHEDULES[task.name]
    cells = yaml.safe_load(JOB.read_text())
    count, places = int(cells["cells"]["count"]), int(cells["rollout"]["capacity"])
    held = schedule.serving(count) * places
    if held % count:
        raise GyreError(f"{task.name}: {held} places don't spread evenly over {count} nodes", "change rollout.capacity in policies.yaml")
    tree: dict[str, Any] = {
        "extends": str(JOB),
        "run": {"name": task.run.name, "dir": str(task.run), "seed": task.seed, "steps": steps},
        "tasks": {"seed": task.seed},
        "harness": {"slots_per_node": held // count},
        "schedule": {"mode": schedule.mode, "streaming": schedule.streaming, "phi": schedule.phi, "mu": schedule.mu},
    }
    if schedule.trainers is not None:
        tree["schedule"]["trainers"] = schedule.trainers
    file = task.folder / f"{task.run.name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def submit(slurm: Cluster, task: Task, steps: int, nodes: int) -> None:
    """One job, to its end. Raises GyreError with the log to read."""
    shutil.rmtree(task.run, ignore_errors=True)
    config = write_config(task, steps)
    log = task.folder / f"{task.run.name}.log"
    command = f"exec {sys.executable} -u -m {MODULE} run {config} {ROW_SECONDS}"
    began = time.monotonic()
    try:
        slurm.run(
            *("sbatch", "--wait", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", f"--chdir={ROOT}"),
            *("--export=ALL", f"--output={log}", f"--wrap={command}"),
            timeout=LONGEST,
        )
    except subprocess.SubprocessError as error:
        raise GyreError(f"the run {task.run.name} failed: {error}", f"read {log}") from error
    print(f"  {task.run.name}: {time.monotonic() - began:.0f} s with its start", file=sys.stderr, flush=True)


def run_all(tasks: Sequence[Task], steps: int, beside: int, cells: int) -> None:
    """Every task, `beside` at a time: the next ones start when all of these are over, for a start takes all cores. One that fails is tried
    once more, at the end; what cores idled while a run went on is written beside it."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-policies-"))
    cores = Cores()
    failed: list[Task] = []
    try:
        with cluster(folder, Spec(nodes=cells * beside)) as slurm, ThreadPoolExecutor(beside) as pool:
            for some, last in ((tasks, False), (failed, True)):
                for first in range(0, len(some), beside):
                    together = some[first : first + beside]
                    futures = [pool.submit(submit, slurm, task, steps, cells) for task in together]
                    for task, future in zip(together, futures, strict=True):
                        error = future.exception()
                        if error is None:
                            done = measure(task.run)
                            task.cores.write_text(json.dumps(cores.idle(done.began, done.began + done.wall)))
                        elif last:
                            raise error
                        else:
                            print(f"  again later: {error}", file=sys.stderr, flush=True)
                            failed.append(task)
    finally:
        cores.close()
        shutil.rmtree(folder, ignore_errors=True)


def plan(names: Sequence[str], seeds: int, folder: Path) -> list[Task]:
    """The runs, neighbours of about one length; a split that is far from the best is run with the first seed only."""
    return [Task(name, seed, folder) for seed in range(seeds) for name in names if seed == 0 or name not in ONCE]


def foretell(found: Mapping[tuple[str, int], Measured]) -> dict[tuple[str, int], float]:
    """Wall time of every policy as the simulator tells it from the elastic run of that seed alone."""
    out = {}
    for name, seed in found:
        if ("elastic", seed) in found:
            s = SCHEDULES[name]
            facts = gather(found["elastic", seed].run, Given())
            told = otherwise(facts, Mode(s.mode), s.streaming, s.phi, s.mu, s.trainers)
            out[name, seed] = told.steps[-1] - told.began
    return out


def main() -> int:
    """Run, measure, print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--beside", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", default=",".join(SCHEDULES), help="names of policies, by commas")
    parser.add_argument("--folder", type=Path, default=Path("runs/policies"), help="where the run directories go")
    parser.add_argument("--again", type=Path, help="make no run, only measure those in this folder")
    parser.add_argument("--pictures", type=Path, help="a folder for one chart a policy, real and simulated")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    if unknown := set(names) - set(SCHEDULES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SCHEDULES)}")
    folder = (options.again or options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = plan(names, options.seeds, folder)
    if options.again is None:
        cells = int(yaml.safe_load(JOB.read_text())["cells"]["count"])
        run_all([task for task in tasks if not task.cores.exists()], options.steps, options.beside, cells)
    found = {(task.name, task.seed): measure(task.run) for task in tasks if task.cores.exists()}
    idle = {(task.name, task.seed): float(json.loads(task.cores.read_text())) for task in tasks if task.cores.exists()}
    print(render(found, idle, foretell(found), ROW_SECONDS))
    if options.json is not None:
        options.json.write_text(json.dumps([as_dict(*key, m, idle[key]) for key, m in found.items()], indent=1))
    if options.pictures is not None:
        draw_pictures({name: m for (name, seed), m in found.items() if seed == 0}, options.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
