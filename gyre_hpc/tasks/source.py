"""Where tasks come from: `tasks.source` in the configuration, as an object that gives the task of a group.

Invariant: `task(index)` is a function of the configuration and the index, so that a resumed run and its first attempt agree.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.paths import RunPaths
from gyre_hpc.tasks import gate, generator, harbor
from gyre_hpc.tasks.chores import MAX_DIFFICULTY
from gyre_hpc.tasks.harbor import Task, TaskError

logger = logging.getLogger(__name__)
CHORES = "builtin:chores"


class TaskSource(Protocol):
    """An endless row of tasks."""

    @property
    def left_out(self) -> Sequence[str]:
        """Why tasks can't be used, one line each."""
        ...

    def task(self, index: int) -> Task:
        """The task of group `index`. Raises GyreError."""
        ...

    def release(self, path: str) -> None:
        """The task in this folder is not needed any more."""
        ...


class ChoresSource:
    """Generated chores, written below `directory` when they are first asked for and removed when released."""

    def __init__(self, seed: int, difficulty: Sequence[int], directory: Path) -> None:
        _check_grades(difficulty)
        self.seed, self.difficulty, self.directory = seed, tuple(difficulty), directory
        self.left_out: Sequence[str] = ()

    def task(self, index: int) -> Task:
        grade = random.Random(f"grade {self.seed} {index}").choice(self.difficulty)
        return generator.generate(self.seed, index, grade, self.directory)

    def release(self, path: str) -> None:
        folder = Path(path)
        if folder.parent.resolve() == self.directory.resolve():
            shutil.rmtree(folder, ignore_errors=True)


class FolderSource:
    """Tasks in Harbor format, one folder each below `path`: all of them in a shuffled order, then again in another one.

    Those that the gate refuses are left out: `left_out` and the log say why. Verdicts are kept in `verdicts`, by folder and time of change,
    each as soon as it is there: a folder whose gating takes longer than the cells wait for goes on where it was.
    """

    def __init__(
        self,
        path: Path,
        seed: int,
        verdicts: Path,
        score: gate.Scorer,
        solve: gate.Solver,
        trying: Callable[[Task], None] = lambda task: None,
    ) -> None:
        """`trying` hears of each task before the gate tries it."""
        folders = _folders(path)
        known: dict[str, str] = json.loads(verdicts.read_text()) if verdicts.exists() else {}
        self.seed = seed
        self.tasks: list[Task] = []
        self.left_out: list[str] = []
        self._order: tuple[int, list[int]] = (-1, [])
        for folder in folders:
            key = f"{folder} {_changed(folder)}"
            if key not in known:
                known[key] = _refusal(folder, score, solve, trying)
                _replace(verdicts, json.dumps(known, indent=1))
            if known[key]:
                logger.warning("task left out: %s", known[key])
                self.left_out.append(known[key])
            else:
                self.tasks.append(harbor.load(folder))
        if not self.tasks:
            raise ConfigError(f"tasks.source = {path} has no usable task: {self.left_out[-1]}", "give a folder of tasks in Harbor format")

    def task(self, index: int) -> Task:
        turn, place = divmod(index, len(self.tasks))
        if self._order[0] != turn:
            order = list(range(len(self.tasks)))
            random.Random(f"order {self.seed} {turn}").shuffle(order)
            self._order = (turn, order)
        return self.tasks[self._order[1][place]]

    def release(self, path: str) -> None:
        """Tasks of a folder are the user's: they stay."""


def task_source(config: Config, paths: RunPaths, trying: Callable[[Task, float], None] = lambda task, seconds: None) -> TaskSource:
    """The source that a configuration names. Raises ConfigError.

    `trying` hears of each task that the gate is about to try, and how many seconds that may take by the task's own limits.
    """
    tasks = config.tasks
    if tasks.source == CHORES:
        return ChoresSource(tasks.seed, tasks.difficulty, paths.tasks)
    if tasks.source.startswith("builtin:"):
        raise ConfigError(f"tasks.source = {tasks.source} is not known", f"{CHORES}, or a folder of tasks in Harbor format")
    from gyre_hpc.executions.scoring import grade

    def told(task: Task) -> None:
        verifier = config.verifier
        trying(task, task.agent_timeout + 2 * (1 + verifier.retries) * min(verifier.timeout, task.verifier_timeout))

    def score(task: Task, workspace: Path) -> float:
        return grade(task, workspace, config)

    return FolderSource(Path(tasks.source), tasks.seed, paths.tasks / "gate.json", score, gate.solve_in_box, told)


def check_source(config: Config) -> None:
    """What can be said of `tasks` without looking into the tasks. Raises ConfigError."""
    if config.tasks.source == CHORES:
        _check_grades(config.tasks.difficulty)
    else:
        _folders(Path(config.tasks.source))


def _check_grades(difficulty: Sequence[int]) -> None:
    wrong = [grade for grade in difficulty if not 1 <= grade <= MAX_DIFFICULTY]
    if wrong:
        raise ConfigError(f"tasks.difficulty has {wrong[0]}", f"grades of {CHORES} go from 1 to {MAX_DIFFICULTY}")


def _folders(path: Path) -> list[Path]:
    """Those that may be tasks, in order. Raises ConfigError if there is none."""
    if not path.is_dir():
        raise ConfigError(f"tasks.source = {path} is no folder", f"give a folder of tasks in Harbor format, or {CHORES}")
    try:
        found = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"tasks.source = {path}: {error.strerror}", "make it readable") from None
    if not found:
        raise ConfigError(f"tasks.source = {path} has no folder in it, so no task", f"give a folder of tasks in Harbor format, or {CHORES}")
    return found


def _replace(path: Path, text: str) -> None:
    """A kill in the middle leaves the old text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    os.replace(temporary, path)


def _refusal(folder: Path, score: gate.Scorer, solve: gate.Solver, trying: Callable[[Task], None]) -> str:
    """Why a folder is no usable task, or ""."""
    try:
        task = harbor.load(folder)
        trying(task)
        gate.check(task, score, solve)
    except TaskError as error:
        return error.line
    return ""


def _changed(folder: Path) -> int:
    return max(entry.stat().st_mtime_ns for entry in [folder, *folder.rglob("*")])
