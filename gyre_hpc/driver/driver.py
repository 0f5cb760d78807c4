"""The driver: owns a run directory and runs one attempt in it.

Invariants:
- one driver per run directory (runlock);
- the exit code of a stop or a death is 75, because everything a process acknowledged is durable and the same command continues;
- a run that has all its steps is done at once.
Order: lock, disk, this node, placement, attempt (attempt.py), and back into Slurm's queue when its time was up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from gyre_hpc import layout
from gyre_hpc.config import Config
from gyre_hpc.driver import disk, requeue, rundir
from gyre_hpc.driver.allocation import Allocation, Placement, find_allocation, find_topology, inside_slurm, place
from gyre_hpc.driver.attempt import Attempt, Watcher, World
from gyre_hpc.driver.history import is_finished, next_attempt
from gyre_hpc.driver.launcher import Launcher, make_launcher
from gyre_hpc.driver.lines import say
from gyre_hpc.driver.preflight import check_node, loose
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.runlock import RunLock
from gyre_hpc.driver.signals import Signals
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths


def drive(
    run_dir: Path,
    *,
    programs: Programs | None = None,
    allocation: Allocation | None = None,
    launcher: Launcher | None = None,
    watcher: Watcher | None = None,
    signals: Signals | None = None,
) -> ExitCode:
    """Run one attempt of the run in `run_dir` to its end. DONE, or RESUMABLE after a stop that was asked for; raises GyreError otherwise.

    `watcher` shows progress in a thread of its own; without one plain lines go to standard output. When Slurm's time is up the job
    is requeued. A run that has all its steps is done at once.
    """
    paths = RunPaths(run_dir.absolute())
    config = rundir.frozen(paths)
    with RunLock(paths.lock) as lock, signals or Signals() as caught:
        if is_finished(paths, config):
            say(f"{paths.root} is done: all {config.run.steps} steps; a larger run.steps continues it")
            return ExitCode.DONE
        with _recorded(paths, allocation):
            disk.check_start(paths.root, config.run.min_free_mb)
            allocation = allocation or find_allocation()
            check_node(config, allocation.nodes)
            world = World(
                allocation,
                placement(allocation, config),
                launcher or make_launcher(allocation, config.slurm.srun_options),
                programs or Programs(),
            )
        code = Attempt(paths, config, world, lock, caught, watcher).run()
    if code == ExitCode.RESUMABLE and caught.time_up and allocation.job is not None:
        _requeue(allocation, config)
    return code


@contextlib.contextmanager
def _recorded(paths: RunPaths, allocation: Allocation | None) -> Iterator[None]:
    """Why an attempt of a job did not begin is an event: `gyre status` and the table of a sweep read nothing else."""
    try:
        yield
    except GyreError as error:
        if allocation.job is not None if allocation is not None else inside_slurm():
            events = EventLog(paths.events)
            with contextlib.suppress(OSError, GyreError):  # a full disk or a damaged log may be what it is about
                events.emit("failure", what=error.what, remedy=error.remedy, attempt=next_attempt(paths))
                events.forget()
        raise


def placement(allocation: Allocation, config: Config) -> Placement:
    """Who goes where, by the network where Slurm knows it; says what is wasted or crowded. Raises ConfigError for what can't be."""
    local = allocation.job is None
    lines = [*layout.waste(config), *loose(config, psutil.virtual_memory().total >> 20)]
    crowded = layout.crowd(config, len(os.sched_getaffinity(0))) if local else None
    for line in [*lines, crowded]:
        if line is not None:
            say(f"gyre: {line}")
    return place(allocation.nodes, config.cells, local, None if local else find_topology(allocation.partition))


def write_report(run_dir: Path) -> None:
    """The report at the end of a run; a run that is done stays done when its report fails."""
    from gyre_hpc.report.html import write

    paths = RunPaths(run_dir)
    try:
        missing = write(paths)
        say(f"report: {paths.report}")
        for line in missing:
            say(f"the report lacks what can't be read: {line}")
    except (GyreError, OSError) as error:
        say(f"no report: {error}; `gyre report {run_dir}` tries again")


def _requeue(allocation: Allocation, config: Config) -> None:
    """Put the job back into the queue. Raises Resumable when it has been there too often."""
    if allocation.restarts >= config.slurm.max_requeues:
        raise Resumable(
            f"job {allocation.job} was requeued {allocation.restarts} times (slurm.max_requeues)", "submit it again: it resumes"
        )
    job = requeue.job_name() or str(allocation.job)
    requeue.requeue(job)
    say(f"job {job} is requeued and will resume")
