"""What an attempt takes over from those before it, and what it tells of that.

Invariants: after a crash between a checkpoint and `step.end` the next attempt tells that step from the checkpoint, so none is skipped or
repeated in the log; weights behind the newest checkpoint are given up, and what they sampled counts from there (gyre_hpc/branches.py).
"""

from __future__ import annotations

import logging

from gyre_hpc.branches import Branch, Branches
from gyre_hpc.checkpoint import RunState
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.paths import RunPaths

logger = logging.getLogger(__name__)


def reconcile(saved: RunState, paths: RunPaths, events: EventLog) -> None:
    """Emit what tells of the checkpointed step if the last attempt died between the checkpoint and that."""
    told: set[str] = set()
    for event in read_events(paths.events):
        if event["kind"] == "steps.again" and event["step"] < saved.step:
            told.clear()  # what was told before is of weights that were given up
        elif event.get("step") == saved.step:
            told.add(event["kind"])
    if "checkpoint" not in told:
        events.emit("checkpoint", step=saved.step)
    if "step.end" not in told:
        events.emit("step.end", **saved.policy["fields"])


def branch_off(saved: RunState | None, here: Branch, consumed_below: int, paths: RunPaths, events: EventLog) -> Branches:
    """The branches from now on: `here` follows those of the checkpoint. Says which steps are done again, if any are."""
    known = Branches.of(saved.policy.get("branches", ())) if saved else Branches()
    newest = 0
    for event in read_events(paths.events):
        newest = int(event["step"]) if event["kind"] == "step.end" else newest
    if newest > here.step:
        logger.warning("steps %d to %d have no checkpoint: they are done again, from step %d", here.step + 1, newest, here.step)
        events.emit("steps.again", step=here.step, newest=newest, first_group=here.groups, first_execution=here.executions)
    return known.resumed(here, consumed_below)
