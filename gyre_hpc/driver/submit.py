"""Submission through submitit: one job, one Python process (the driver) on the first node of an N-node allocation.

Invariants: the job runs the frozen configuration of its run directory, so the job's pickle holds a path and nothing else; a job that is
requeued, for whatever reason, runs the same pickle and resumes. What submitit does by default and we do not:
- no srun around the driver (it starts srun steps itself): the batch script execs Python, so that signals reach it;
- the warning before the time limit goes to the batch process only (`--signal=B:...`): the steps must outlive it to stop in good order;
- USR1 and USR2 are ignored until the driver listens: a signal during Python's slow start would end the job without a requeue;
- the driver requeues itself (driver/requeue.py): submitit's own `scontrol requeue` may be killed by the requeue it asks for.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable, DelayedSubmission, clean_env

from gyre_hpc.config import Config
from gyre_hpc.driver.inputs import check_inputs
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.rundir import frozen
from gyre_hpc.errors import ConfigError, ExitCode, GyreError, Resumable
from gyre_hpc.paths import RunPaths

SIGNAL = "USR1"


class DriverJob(Checkpointable):
    """What the job runs. `__call__` returns when the run is done and raises otherwise, so that submitit's result tells the two apart."""

    def __init__(self, run_dir: Path, programs: Programs | None = None) -> None:
        self.run_dir = run_dir
        self.programs = programs

    def __call__(self) -> int:
        from gyre_hpc.driver.driver import drive, write_report
        from gyre_hpc.driver.lines import say

        try:
            code = drive(self.run_dir, programs=self.programs)
        except GyreError as error:
            say(f"gyre: {error.line}")
            raise
        if code != ExitCode.DONE:  # stopped and requeued, or being cancelled: no result yet
            sys.exit(int(code))
        write_report(self.run_dir)
        return int(code)

    def checkpoint(self) -> DelayedSubmission:
        """Should submitit's own handler come first (before the driver listens): everything is in the run directory."""
        return DelayedSubmission(self)


def submit_run(config: Config, paths: RunPaths, programs: Programs | None = None) -> str:
    """Submit one run; the job's id. Raises ConfigError where there is no Slurm or it refuses."""
    require_slurm()
    check_inputs(frozen(paths))
    with slurm_errors():
        executor = make_executor(config, folder(paths.root), config.run.name)
        with outer_environment():
            return str(executor.submit(DriverJob(paths.root, programs)).job_id)


def require_slurm() -> None:
    """Raises ConfigError where nothing can be submitted, before anything is made."""
    lacking = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if lacking:
        raise ConfigError(f"no Slurm here: {', '.join(lacking)} not on PATH", "go to a login node, or use `gyre run` without Slurm")


def folder(root: Path) -> Path:
    """submitit's own files of a run or a sweep."""
    return root / "submitit"


def make_executor(config: Config, where: Path, name: str) -> submitit.SlurmExecutor:
    """A submitit executor that asks for what `slurm` and `cells` say."""
    where.mkdir(parents=True, exist_ok=True)
    executor = submitit.SlurmExecutor(folder=where, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(**parameters(config, name))
    return executor


def parameters(config: Config, name: str) -> dict[str, Any]:
    """submitit's parameters, pure. `slurm.additional` has the last word."""
    slurm = config.slurm
    wanted = {
        "job_name": f"gyre-{name}",
        "time": slurm.time_minutes,
        "nodes": nodes_wanted(config),
        "ntasks_per_node": 1,
        "cpus_per_task": slurm.cpus_per_task,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "gpus_per_node": slurm.gpus_per_node or None,
        "array_parallelism": config.sweep.parallelism,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": [*slurm.setup, "trap '' USR1 USR2"],
        "additional_parameters": {"signal": f"B:{SIGNAL}@{slurm.signal_seconds}", "requeue": True, **slurm.additional},
    }
    return {key: value for key, value in wanted.items() if value is not None}


def nodes_wanted(config: Config) -> int:
    """One node more than the cells and the standalone ones are, for the controller and the gateway."""
    return config.cells.count * config.cells.nodes_per_cell + config.cells.standalone + 1


@contextlib.contextmanager
def outer_environment() -> Iterator[None]:
    """Submit as from outside: inside an allocation sbatch would take SLURM_* as its options. SLURM_CONF (which cluster) stays."""
    conf = os.environ.get("SLURM_CONF")
    with clean_env():
        if conf is not None:
            os.environ["SLURM_CONF"] = conf
        yield


@contextlib.contextmanager
def slurm_errors() -> Iterator[None]:
    try:
        yield
    except submitit.core.utils.FailedJobError as error:
        raise ConfigError(
            f"sbatch refused: {last_line(str(error))}", "check the `slurm` section of the configuration, and that `sinfo` works here"
        ) from None
    except submitit.core.utils.FailedSubmissionError as error:
        raise Resumable(f"submission failed: {last_line(str(error))}", "try again") from None


def last_line(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else text
