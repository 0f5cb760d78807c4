"""Asking Slurm to put our own job back into the queue, where the next attempt resumes.

`scontrol requeue` makes Slurm end the job at once, the scontrol child included: it is started with SIGTERM ignored (which survives exec),
so that it can finish its request; and whatever it says, the job's own state is what counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

from gyre_hpc.driver.allocation import SCONTROL_TIMEOUT, ask, job_command, parse_job
from gyre_hpc.errors import GyreError


def job_name(env: Mapping[str, str] | None = None) -> str | None:
    """The id to give to scontrol: of an array element `ARRAY_INDEX`, because the element's own id may stand for the whole array."""
    env = os.environ if env is None else env
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def requeue_command(job: str) -> list[str]:
    return ["scontrol", "requeue", job]


def requeue(job: str) -> None:
    """Requeue the job. Raises GyreError if Slurm refuses."""
    command = requeue_command(job)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT,
            check=False,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
    except subprocess.TimeoutExpired:
        raise GyreError(f"`{' '.join(command)}` gave no answer in {SCONTROL_TIMEOUT:.0f} s", "submit the job again: it resumes") from None
    if done.returncode and not _is_requeued(job):
        raise GyreError(f"Slurm did not requeue job {job}: {done.stderr.strip()}", "submit it again: it resumes (the job needs --requeue)")


def _is_requeued(job: str) -> bool:
    try:
        return parse_job(ask(job_command(job))).get("JobState") in {"PENDING", "REQUEUED", "COMPLETING"}
    except GyreError:
        return False
