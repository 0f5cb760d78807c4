"""What the attempts of a run have left: numbers, whether all is done. Reads only; the event log is the truth."""

from __future__ import annotations

import re

from gyre_hpc.config import Config
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths


def next_attempt(paths: RunPaths) -> int:
    """One more than the attempts that have left events, logs or a runtime folder: no number comes twice, also where logs were removed."""
    numbers = [
        int(found[1])
        for folder in (paths.logs, paths.root / "runtime")
        if folder.is_dir()
        for p in folder.iterdir()
        if (found := re.fullmatch(r"attempt-(\d+)", p.name))
    ]
    numbers += [int(event["attempt"]) for event in read_events(paths.events) if event["kind"] == "run.start"]
    return max(numbers, default=0) + 1


def is_finished(paths: RunPaths, config: Config) -> bool:
    """Whether the last attempt ended as done and no further steps are wanted."""
    status, step = "", 0
    for event in read_events(paths.events):
        if event["kind"] == "run.end":
            status = event["status"]
        elif event["kind"] == "step.end":
            step = max(step, int(event["step"]))
    return status == "done" and step >= config.run.steps
