"""A stop between two checkpoints: the weights of now are saved if the time that is left allows.

Invariants: a checkpoint at a stop is one like any other (of the last finished step; the open one is given up, its executions are on disk);
it is tried where one and a half times what the last one took fits into the time left, or where none was ever timed: one that is cut off
leaves nothing behind, and the older ones as they are. It is asked of the core's leader at once, whatever else is under way: a transfer or a
publication may wait for an engine or a gateway that the same signal has ended (`beside`); only a close goes first, for as long as the step
before it can still be saved (`for_a_while`), and is given up then. All that the save waits for is what the core itself is at: a micro-step
is given up for it (gyre_hpc/training/interrupt.py), and so are sums that wait for other cells. The log says which it was, and why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Save
from gyre_hpc.errors import GyreError, Resumable
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

    def needs(self, step: int, left: float) -> float:
        """Seconds that must be left for that of `step`, if `left` are now: none where it has one."""
        if step <= self.step:
            return 0.0
        return left / 2 if self.seconds is None else MARGIN * self.seconds + 3 * RESERVE

    def fits(self, left: float) -> tuple[bool, str]:
        """(whether one can be written in `left` seconds, the words for the log)."""
        if self.seconds is None:
            return left > RESERVE, f"none was timed before, {left:.1f} s are left"
        return MARGIN * self.seconds + RESERVE <= left, f"the last took {self.seconds:.1f} s, {left:.1f} s are left"


Hand = Generator[None, None, Any]
"""What was in hand when the stop was asked for."""


@dataclass(frozen=True)
class Newest:
    """The last step that is over. `fields`: what its end told; `state`: of the controller, for its checkpoint."""

    step: int
    fields: dict[str, Any]
    state: dict[str, Any]


def save_at_stop(asking: Asking, events: EventLog, saves: Saves, newest: Newest, left: float, busy: str) -> Generator[None, None, bool]:
    """Write the checkpoint of the newest step unless there is one or there is no time. `busy`: what the core may be at, or "".

    Whether that is settled: not where the core has closed the next step meanwhile. Raises Resumable: it was late.
    """
    step = newest.step
    if step <= saves.step:
        logger.info("stop: the newest step, %d, has its checkpoint", step)
        return True
    fits, why = saves.fits(left)
    if not fits:
        logger.warning("stop: no checkpoint of step %d (%s: deadlines.stop); the steps behind %d are done again", step, why, saves.step)
        return True
    behind = f", once the core is through with {busy}" if busy else ""
    logger.info("stop: writing a checkpoint of step %d (%s)%s", step, why, behind)
    began = time.monotonic()
    name = f"the checkpoint of step {step} at the stop{behind}"
    report = yield from asking.ask(0, Save(step, newest.fields, newest.state, left), name, left)
    if report is None:
        raise Resumable(
            f"{name} was not there within {left:.0f} s: the steps behind {saves.step} are done again",
            "raise deadlines.stop, or lower checkpoint.every; the same command resumes",
        )
    if "failed" in report:
        logger.info("stop: no checkpoint of step %d: %s", step, report["failed"])
        return False
    told = report["checkpoint"]
    saves.took(step, told["seconds"])
    events.emit("checkpoint", step=step, **told, stop=True)
    waited = max(0.0, time.monotonic() - began - told["seconds"])
    logger.info("stop: step %d is saved, in %.1f s, after %.1f s of waiting for the core", step, told["seconds"], waited)
    return True


def for_a_while(activity: Hand, name: str, still: Callable[[], bool]) -> Generator[None, None, Hand | None]:
    """What was in hand, as long as `still` says so; None once it is over. What it raises is a line in the log."""
    while still():
        try:
            next(activity)
        except StopIteration:
            return None
        except GyreError as error:
            logger.warning("stop: %s did not end well: %s", name, error.line)
            return None
        yield
    return activity


def beside(save: Generator[None, None, bool], activity: Hand | None, name: str, left: Callable[[], float]) -> Generator[None, None, bool]:
    """The save to its end, and what was in hand beside it: for half of the time that the save leaves it, and what it raises is a line in
    the log, for the attempt ends anyway. What the save says; raises what it raises."""
    saving, settled, until = True, True, float("inf")
    if activity is not None:
        logger.info("stop: %s is ended beside", name)
    while saving or activity is not None:
        if saving:
            try:
                next(save)
            except StopIteration as stop:
                saving, settled, until = False, stop.value, time.monotonic() + max(0.0, left() / 2)
        if activity is not None:
            try:
                next(activity)
            except StopIteration:
                activity = None
            except GyreError as error:
                logger.warning("stop: %s did not end well: %s", name, error.line)
                activity = None
            else:
                if time.monotonic() > until:
                    logger.warning("stop: %s is given up, %.1f s are left", name, left())
                    activity.close()
                    activity = None
        yield
    return settled
