"""Elastic against its baselines, on this machine: wall time of real runs on a virtual Slurm cluster, and what the simulator says of each.

    python -m benchmarks.policies [--seeds 3] [--steps 12] [--beside 2] [--only elastic,colocate] [--pictures DIR] [--json FILE]
    python -m benchmarks.policies --again DIR          (no run: what an earlier one left in DIR)

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
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import yaml

from benchmarks.policies_job import MODULE
from benchmarks.policies_measure import measure
from benchmarks.policies_table import as_dict, draw_pictures, render
from gyre_hpc.errors import GyreError
from tests.slurm.cluster import Cluster, Spec, cluster

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_suffix(".yaml")
ROW_SECONDS = 0.5
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
    "async+streaming 2": Schedule("async", True, 1.5, 1, 2),
    "async+streaming 4": Schedule("async", True, 1.5, 1, 4),
}
"""In the order in which they run: neighbours take about as long. Async with its number of trainers, of six cells (1 and 5 take twice the
time)."""


class Cores:
    """Samples how idle the machine's cores are, to be asked for the share of any window of time."""

    def __init__(self, period: float = 1.0) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(period,), daemon=True)
        self._thread.start()

    def _sample(self, period: float) -> None:
        while not self._over.wait(period):
            now = psutil.cpu_times()
            self._samples.append((time.time(), now.idle + now.iowait, sum(now[:8])))

    def idle(self, start: float, end: float) -> float:
        """Share of the cores' time between two clocks that nobody used."""
        inside = [s for s in self._samples if start <= s[0] <= end]
        if len(inside) < 2:
            return float("nan")
        return (inside[-1][1] - inside[0][1]) / (inside[-1][2] - inside[0][2])

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Task:
    """One run to be made."""

    name: str
    seed: int
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}-seed{self.seed}"


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
    """Every task, `beside` at a time: the next ones start when all of these are over, for a start takes all cores."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-policies-"))
    try:
        with cluster(folder, Spec(nodes=cells * beside)) as slurm, ThreadPoolExecutor(beside) as pool:
            for first in range(0, len(tasks), beside):
                together = [pool.submit(submit, slurm, task, steps, cells) for task in tasks[first : first + beside]]
                for future in together:
                    future.result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run, measure, print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--beside", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", default=",".join(SCHEDULES), help="names of policies, by commas")
    parser.add_argument("--folder", type=Path, default=Path("runs/policies"), help="where the run directories go")
    parser.add_argument("--again", type=Path, help="only measure what an earlier call left in this folder")
    parser.add_argument("--pictures", type=Path, help="a folder for one chart a policy, real and simulated")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    if unknown := set(names) - set(SCHEDULES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SCHEDULES)}")
    folder = (options.again or options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [Task(name, seed, folder) for seed in range(options.seeds) for name in names]
    idle_file = folder / "cores.json"
    if options.again is None:
        cores = Cores()
        try:
            run_all(tasks, options.steps, options.beside, int(yaml.safe_load(JOB.read_text())["cells"]["count"]))
        finally:
            cores.close()
    found = {(task.name, task.seed): measure(task.run) for task in tasks}
    if options.again is None:
        idle = {f"{n} {s}": cores.idle(m.began, m.began + m.wall) for (n, s), m in found.items()}
        idle_file.write_text(json.dumps(idle))
    idle = json.loads(idle_file.read_text())
    print(render(found, {name: fmean(idle[f"{name} {s}"] for s in range(options.seeds)) for name in names}, ROW_SECONDS))
    if options.json is not None:
        options.json.write_text(json.dumps([as_dict(n, s, m, idle[f"{n} {s}"]) for (n, s), m in found.items()], indent=1))
    if options.pictures is not None:
        draw_pictures({name: found[name, 0] for name in names}, options.pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
