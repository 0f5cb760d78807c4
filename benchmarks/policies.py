"""Elastic against its baselines, on this machine: wall time of real runs on a virtual Slurm cluster, and what the simulator says of each.

    python -m benchmarks.policies [--seeds 3] [--steps 12] [--beside 2] [--only elastic,colocate] [--pictures DIR] [--json FILE]
    python -m benchmarks.policies --rows --pictures docs/pictures     (the paper's eight rows, small: policies_rows.py)
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from benchmarks import policies_plan, policies_rows
from benchmarks.policies_cores import Cores
from benchmarks.policies_job import MODULE
from benchmarks.policies_measure import Measured, measure
from benchmarks.policies_plan import SCHEDULES, Task, plan, write_config
from benchmarks.policies_table import as_dict, draw_pictures, render, render_rows
from cells.events import Mode
from gyre_hpc.configfile import load
from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.facts import Given, gather
from gyre_hpc.simulation.replay import otherwise
from tests.slurm.cluster import Cluster, Spec, cluster

ROOT = Path(__file__).parents[1]
LONGEST = 900.0


@dataclass(frozen=True)
class Job:
    """What all runs of a call have in common."""

    file: Path
    steps: int
    row_seconds: float


def submit(slurm: Cluster, task: Task, job: Job) -> None:
    """One Slurm job, to its end. Raises GyreError with the log to read."""
    shutil.rmtree(task.run, ignore_errors=True)
    config = write_config(task, job.file, job.steps)
    log = task.folder / f"{task.run.name}.log"
    command = f"exec {sys.executable} -u -m {MODULE} run {config} {job.row_seconds}"
    began = time.monotonic()
    try:
        slurm.run(
            *("sbatch", "--wait", "--parsable", f"--nodes={task.schedule.nodes}", "--ntasks-per-node=1", "--exclusive", f"--chdir={ROOT}"),
            *("--export=ALL", f"--output={log}", f"--wrap={command}"),
            timeout=LONGEST,
        )
    except subprocess.SubprocessError as error:
        raise GyreError(f"the run {task.run.name} failed: {error}", f"read {log}") from error
    print(f"  {task.run.name}: {time.monotonic() - began:.0f} s with its start", file=sys.stderr, flush=True)


def run_all(tasks: Sequence[Task], job: Job, beside: int) -> None:
    """Every task, `beside` at a time: the next ones start when all of these are over, for a start takes all cores.

    A run that fails, or can't be measured as one attempt, is made once more, at the end, and then counts; what cores idled while a run went
    on is written beside it. Raises GyreError, when all are over, for the first that failed twice.
    """
    folder = Path(tempfile.mkdtemp(prefix="gyre-policies-"))
    cores = Cores()
    nodes = max((task.schedule.nodes for task in tasks), default=1)
    try:
        with cluster(folder, Spec(nodes=nodes * beside)) as slurm, ThreadPoolExecutor(beside) as pool:
            failed = _run_some(tasks, beside, pool, lambda task: submit(slurm, task, job), cores.idle)
            for error in failed.values():
                print(f"  again: {error}", file=sys.stderr, flush=True)
            left = _run_some(list(failed), beside, pool, lambda task: submit(slurm, task, job), cores.idle)
    finally:
        cores.close()
        shutil.rmtree(folder, ignore_errors=True)
    for error in left.values():
        raise error


def _run_some(
    tasks: Sequence[Task], beside: int, pool: Executor, make: Callable[[Task], None], idle: Callable[[float, float], float]
) -> dict[Task, GyreError]:
    """Make each, measure it, and write down what `idle` says of its time; those that failed, with why."""
    failed: dict[Task, GyreError] = {}
    for first in range(0, len(tasks), beside):
        together = tasks[first : first + beside]
        futures = [pool.submit(make, task) for task in together]
        wait(futures)
        for task, future in zip(together, futures, strict=True):
            try:
                future.result()
                done = measure(task.run)
            except GyreError as error:
                failed[task] = error
                continue
            task.cores.write_text(json.dumps(idle(done.began, done.began + done.wall)))
    return failed


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
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster ends with the benchmark
    schedules = policies_rows.rows() if options.rows else SCHEDULES
    names = [name.strip() for name in (options.only or ",".join(schedules)).split(",")]
    if unknown := set(names) - set(schedules):
        raise GyreError(f"unknown: {', '.join(sorted(unknown))}", f"there are {', '.join(schedules)}")
    module = policies_rows if options.rows else policies_plan
    steps = options.steps or load(module.JOB).run.steps
    folder = (options.again or options.folder or Path("runs/policies-rows" if options.rows else "runs/policies")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = plan(names, schedules, options.seeds or (1 if options.rows else 3), folder)
    missing = [task for task in tasks if not task.cores.exists()]
    if options.again is None and missing:
        run_all(missing, Job(module.JOB, steps, module.ROW_SECONDS), options.beside or (1 if options.rows else 2))
    found = {(task.name, task.seed): measure(task.run) for task in tasks if task.cores.exists()}
    if not found:
        raise GyreError(f"no run in {folder} is done", "leave out --again to make them")
    idle = {(task.name, task.seed): float(json.loads(task.cores.read_text())) for task in tasks if task.cores.exists()}
    if options.rows:
        print(render_rows(found, idle, module.ROW_SECONDS))
    else:
        print(render(found, idle, foretell(found), module.ROW_SECONDS))
    if options.json is not None:
        options.json.write_text(json.dumps([as_dict(*key, m, idle[key]) for key, m in found.items()], indent=1))
    if options.pictures is not None:
        draw_pictures({name: m for (name, seed), m in found.items() if seed == 0}, options.pictures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="the paper's eight rows, small, in place of the comparison")
    parser.add_argument("--seeds", type=int, help="3; 1 with --rows")
    parser.add_argument("--steps", type=int, help="those of the job's file")
    parser.add_argument("--beside", type=int, help="runs at the same time; 2, or 1 with --rows")
    parser.add_argument("--only", help="names of policies or rows, by commas")
    parser.add_argument("--folder", type=Path, help="where the run directories go; runs/policies or runs/policies-rows")
    parser.add_argument("--again", type=Path, help="make no run, only measure those in this folder")
    parser.add_argument("--pictures", type=Path, help="a folder for one chart a policy, real and simulated")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GyreError as error:
        sys.exit(str(error))
