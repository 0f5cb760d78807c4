"""A sweep: every combination of `sweep.grid` is a run of its own below the sweep's directory; one submitit array runs them all.

Invariants: every point is checked before any is submitted; all points ask Slurm for the same resources (they are one array); results are
read from the points' event logs, so a table can be made at any time, by anybody. Slurm is asked only whether an element still exists.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.driver.allocation import ask
from gyre_hpc.driver.inputs import check_inputs
from gyre_hpc.driver.programs import Programs
from gyre_hpc.driver.rundir import prepare, resolve
from gyre_hpc.errors import ConfigError, ExitCode, GyreError, Resumable
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths

READ_EVERY = 2.0
ASK_EVERY = 15.0
GRACE = 30.0
"""Seconds that the array may be unknown to Slurm (its last files may still be on their way) before its points count as gone."""
QUEUE_DEADLINE = 14 * 86400.0
LAST = 5
_WHY = {
    "lost": "its job ended without a word (killed, or its node is gone); submit the sweep again, it resumes",
    "not started": "its job ended before the run began; see the log of its job in `submitit` beside the points",
    "stopped": "stopped before its last step; submit the sweep again, it resumes",
}

log = logging.getLogger("gyre.driver")


@dataclass(frozen=True)
class Point:
    """One combination: dotted key -> value, and the run that it makes."""

    name: str
    values: Mapping[str, Any]
    config: Config
    paths: RunPaths


@dataclass(frozen=True)
class Row:
    """The result of a point. `score_last`: sampled mean score of the last 5 steps; None before the first step. `failure`: why it is not
    done, in the run's own words; None if it has not said."""

    point: str
    values: dict[str, Any]
    status: str
    """waiting, running, done, stopped, failed; of an array that is gone also: lost (ended without a word), not started."""
    steps: int
    wanted: int
    score_first: float | None
    score_last: float | None
    run: str
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(config: Config) -> list[Point]:
    """Every point of the grid, checked. Raises ConfigError for a bad key or value, or an empty grid."""
    grid = config.sweep.grid
    if not grid or not all(grid.values()):
        raise ConfigError("sweep.grid is empty", "name keys and lists of values, for example sweep: {grid: {training.lr: [0.001, 0.002]}}")
    ours = [key for key in grid if key in ("run.dir", "run.name") or key.split(".")[0] == "sweep"]
    if ours:
        raise ConfigError(
            f"sweep.grid has {ours[0]}", "take it out: a point's folder and name are made of its values, and all share one sweep"
        )
    root = config.run_dir.expanduser().absolute()
    points = [_point(config, root, dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]
    if len({point.name for point in points}) < len(points):
        raise ConfigError("sweep.grid lists a value twice", "remove the duplicate")
    return points


def submit_points(points: Sequence[Point], programs: Programs | None = None) -> str:
    """Prepare every run directory and submit one array; its job id."""
    from gyre_hpc.driver import submit

    asked = {str(submit.parameters(point.config, "sweep")) for point in points}
    if len(asked) > 1:
        raise ConfigError("the points of sweep.grid ask Slurm for different resources", "keep cells.* and slurm.* out of the grid")
    submit.require_slurm()
    for point in points:
        check_inputs(resolve(point.config))
    for point in points:
        prepare(point.config)
    root = points[0].paths.root.parent
    with submit.slurm_errors():
        executor = submit.make_executor(points[0].config, submit.folder(root), root.name)
        with submit.outer_environment(), executor.batch():
            jobs = [executor.submit(submit.DriverJob(point.paths.root, programs)) for point in points]
    return str(jobs[0].job_id).split("_")[0]


def wait(points: Sequence[Point], job: str) -> list[Row]:
    """Until every point is over, by its own account or because Slurm has no such element any more."""
    end = time.monotonic() + QUEUE_DEADLINE
    asked, seen, alive = 0.0, time.monotonic(), True
    before = _failed(results(points))  # what an earlier array left: this one tries those points again
    while True:
        rows = results(points)
        before &= _failed(rows)
        over = [row for row in rows if row.status == "done" or (row.status == "failed" and row.point not in before)]
        if len(over) == len(rows):
            return rows
        now = time.monotonic()
        if now - asked >= ASK_EVERY:
            asked, alive = now, job_alive(job)
            log.info("%d of %d points are over; the array %s", len(over), len(rows), "lives" if alive else "is gone")
            if alive:
                seen = now
        if not alive and now - seen > GRACE:
            return [_gone(row) for row in rows]
        if now > end:
            raise Resumable(
                f"waited {QUEUE_DEADLINE / 86400:.0f} days for array {job}", "the points go on; the same command shows their table"
            )
        time.sleep(READ_EVERY)


def _gone(row: Row) -> Row:
    """What a point is whose job is gone and that has not told its end itself."""
    return replace(row, status={"running": "lost", "waiting": "not started"}.get(row.status, row.status))


def _failed(rows: Sequence[Row]) -> set[str]:
    return {row.point for row in rows if row.status == "failed"}


def results(points: Sequence[Point]) -> list[Row]:
    """What the event logs of the points say now."""
    return [_row(point) for point in points]


def exit_code(rows: Sequence[Row]) -> ExitCode:
    """DONE if all are done, FAILED if one failed, else RESUMABLE."""
    found = {row.status for row in rows}
    return ExitCode.DONE if found == {"done"} else ExitCode.FAILED if "failed" in found else ExitCode.RESUMABLE


def print_table(rows: Sequence[Row]) -> None:
    """A table for people, one line a point."""
    from rich.console import Console
    from rich.table import Table

    table = Table("point", "status", "steps", "score of the first 3", f"of the last {LAST}", "run")
    for row in rows:
        steps = f"{row.steps} of {row.wanted}"
        table.add_row(row.point, row.status, steps, _score(row.score_first), _score(row.score_last), row.run)
    console = Console()
    if not console.is_terminal:  # a log has no width: nothing may be cut off
        console = Console(width=40 + max((len(row.point) + len(row.run) for row in rows), default=0) + 60)
    console.print(table)
    for row in rows:
        why = row.failure or _WHY.get(row.status)
        if why and row.status not in ("done", "running"):
            console.print(f"{row.point}: {why}", markup=False, highlight=False, soft_wrap=True)


def job_command(job: str) -> list[str]:
    return ["squeue", "--noheader", f"--jobs={job}", "--format=%i"]


def job_alive(job: str) -> bool:
    """Whether any element of the array is queued or running. A controller that doesn't answer is taken for yes."""
    try:
        return bool(ask(job_command(job)).strip())
    except GyreError as error:
        return "Invalid job id" not in error.what


def _point(config: Config, root: Path, values: dict[str, Any]) -> Point:
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        *parents, leaf = key.split(".")
        at = tree
        for name in parents:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"sweep.grid: {name} in {key} is not a section", "use keys such as training.lr")
        at[leaf] = value
    name = ",".join(f"{short}={_plain(value)}" for short, value in zip(_short_names(values), values.values(), strict=True))
    tree["run"].update(name=f"{config.run.name}-{name}", dir=str(root / name))
    checked = check(tree, "sweep.grid")
    return Point(name, values, checked, RunPaths(root / name))


def _short_names(values: Mapping[str, Any]) -> Iterator[str]:
    """The last part of a key where that is unique."""
    lasts = [key.rsplit(".", 1)[-1] for key in values]
    for key, last in zip(values, lasts, strict=True):
        yield last if lasts.count(last) == 1 else key


def _plain(value: object) -> str:
    """A value as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", str(value)).strip("-") or "none"


def _row(point: Point) -> Row:
    scores: dict[int, float] = {}
    status, failure = "waiting", None
    try:
        for event in read_events(point.paths.events):
            match event["kind"]:
                case "step.end":
                    scores[int(event["step"])] = float(event["score_mean"])
                case "steps.again":
                    scores = {step: score for step, score in scores.items() if step <= int(event["step"])}
                case "run.start":
                    status, failure = "running", None
                case "failure":
                    failure = f"{event['what']}; {event.get('remedy', '')}".rstrip("; ")
                    status = status if status == "running" else "failed"  # no attempt began: the job is over
                case "run.end":
                    status = str(event["status"])
    except GyreError as error:  # one damaged log keeps no table away
        status, failure = "failed", error.line
    ordered = [scores[step] for step in sorted(scores)]
    first, last, steps = _mean(ordered[:3]), _mean(ordered[-LAST:]), point.config.run.steps
    return Row(point.name, dict(point.values), status, len(ordered), steps, first, last, str(point.paths.root), failure)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
