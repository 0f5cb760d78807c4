"""A stop between two checkpoints: the weights of now are saved if the time that is left allows.

Invariants: a checkpoint at a stop is one like any other (of the last finished step; the open one is given up, its executions are on disk);
it is tried where one and a half times what the last one took fits into the time left, or where none was ever timed: one that is cut off
leaves nothing behind, and the older ones as they are. The log says which it was, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from typing import Any

from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Save
from gyre_hpc.events import EventLog

logger = logging.getLogger(__name__)
MARGIN = 1.5
"""How much longer than the last one the next may take."""
RESERVE = 1.0
"""Seconds for what comes behind it: engines, channels, MPI."""


class Saves:
    """What is known of checkpoints: the step of the newest, seconds of the last that was timed."""

    def __init__(self, step: int, events: Iterable[dict[str, Any]]) -> None:
        """`step`: of the checkpoint from which the attempt goes on; `events`: those of the run."""
        self.step = step
        timed = [float(event["seconds"]) for event in events if event["kind"] == "checkpoint" and "seconds" in event]
        self.seconds = timed[-1] if timed else None

    def took(self, step: int, seconds: float) -> None:
        """There is one of `step` now."""
        self.step, self.seconds = step, seconds

    def fits(self, left: float) -> tuple[bool, str]:
        """(whether one can be written in `left` seconds, the words for the log)."""
        if self.seconds is None:
            return left > RESERVE, f"none was timed before, {left:.1f} s are left"
        return MARGIN * self.seconds + RESERVE <= left, f"the last took {self.seconds:.1f} s, {left:.1f} s are left"


def save_at_stop(
    asking: Asking, events: EventLog, saves: Saves, step: int, fields: dict[str, Any], state: dict[str, Any], left: float
) -> Generator[None, None, None]:
    """Write the checkpoint of `step`, whose `fields` were told, unless there is one or there is no time. Raises Resumable: it was late."""
    if step <= saves.step:
        logger.info("stop: the newest step, %d, has its checkpoint", step)
        return
    fits, why = saves.fits(left)
    if not fits:
        logger.warning("stop: no checkpoint of step %d (%s: deadlines.stop); the steps behind %d are done again", step, why, saves.step)
        return
    logger.info("stop: writing a checkpoint of step %d (%s)", step, why)
    reports = yield from asking.agree(Save(step, fields, state, left), f"the checkpoint of step {step} at the stop", left)
    told = reports[0]["checkpoint"]
    saves.took(step, told["seconds"])
    events.emit("checkpoint", step=step, **told, stop=True)
    logger.info("stop: step %d is saved, in %.1f s", step, told["seconds"])
