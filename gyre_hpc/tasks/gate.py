"""The gate of an import: a task is used only if its reference solution scores 1 and doing nothing scores 0.

Invariant: what runs here are the task's own scripts, hence only in a box; the gate itself only compares. `admit` answers, `check` raises.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.errors import GyreError
from gyre_hpc.tasks.harbor import Task, TaskError

Scorer = Callable[[Task, Path], float]
Solver = Callable[[Task, Path], None]
_EPSILON = 1e-6


@dataclass(frozen=True)
class Verdict:
    """What the gate found; `refusal` is empty for a task that may be used."""

    nothing: float | None
    reference: float | None
    refusal: str


def admit(task: Task, score: Scorer, solve: Solver) -> Verdict:
    """Score a fresh workspace untouched, and another one after the reference solution."""
    nothing = reference = None
    try:
        with _workspace(task) as idle:
            nothing = score(task, Path(idle))
        if abs(nothing) > _EPSILON:
            return Verdict(nothing, None, f"doing nothing scores {nothing:g}, not 0")
        with _workspace(task) as worked:
            solve(task, Path(worked))
            reference = score(task, Path(worked))
    except GyreError as error:
        return Verdict(nothing, reference, error.what)
    if abs(reference - 1.0) > _EPSILON:
        return Verdict(nothing, reference, f"the reference solution scores {reference:g}, not 1")
    return Verdict(nothing, reference, "")


def check(task: Task, score: Scorer, solve: Solver) -> None:
    """Raises TaskError when the gate refuses the task."""
    verdict = admit(task, score, solve)
    if verdict.refusal:
        raise TaskError(f"task {task.path} is refused: {verdict.refusal}", "mend the task or leave it out")


def _workspace(task: Task) -> tempfile.TemporaryDirectory[str]:
    temporary = tempfile.TemporaryDirectory(prefix="gyre-gate-", ignore_cleanup_errors=True)
    if task.environment.is_dir():
        ignored = shutil.ignore_patterns("Dockerfile", "docker-compose.yaml")
        shutil.copytree(task.environment, temporary.name, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    return temporary


def solve_in_box(task: Task, workspace: Path) -> None:
    """Run the reference solution on a workspace, in a box as an agent's. Raises GyreError when it fails or runs over the agent's time."""
    from gyre_hpc.executions import sandbox

    if not (task.solution / "solve.sh").is_file():
        raise GyreError(f"task {task.path}: solution/solve.sh is missing", "add the reference solution")

    async def run() -> sandbox.Exit:
        box = sandbox.Box(workspace.resolve(), mounts=(sandbox.Mount(task.solution.resolve(), "/solution"),))
        with tempfile.TemporaryFile() as output:
            running = sandbox.start(sandbox.detect(), box, ["/bin/bash", "/solution/solve.sh"], output)
        return await running.wait(task.agent_timeout)

    ended = asyncio.run(run())
    if ended.timed_out or ended.code != 0:
        how = f"runs over {task.agent_timeout:g} s" if ended.timed_out else f"ends with code {ended.code}"
        raise GyreError(f"the reference solution {how}", "mend the task")
