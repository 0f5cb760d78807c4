"""Plain progress lines from the event log, for terminals that can't draw and for Slurm's output file.

Invariant: decoration. Where they can't be written any more (`| head`, a reader that was killed, a full disk below the output file) the run
goes on without them; events.jsonl has everything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import IO, Any

from gyre_hpc.driver.logfile import log

QUIET = frozenset({"execution.end", "run.end", "failure"})
"""Not told as events: too many, or said by whoever ends the command (a failure is its last line, on standard error)."""
LOST = "execution.lost"


def say(line: str) -> None:
    """To whoever runs the command, as long as it can be written."""
    try:
        print(line, flush=True, file=sys.stdout)
    except OSError as error:
        log.warning("no more lines: standard output can't be written (%s); the run goes on", error.strerror)
        mute(sys.stdout)


def mute(stream: IO[str]) -> None:
    """What comes next goes nowhere, and so does what is buffered: Python flushes at its end, and a failure there changes the exit code."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def describe(event: dict[str, Any]) -> str | None:
    """One line for an event, or None if a person watching a long run would not want it."""
    kind = event["kind"]
    if kind in QUIET or (kind == "transfer.phase" and not event.get("undo") and "failed" not in event):
        return None
    if kind == "step.end":
        parts = [f"step {event.get('step')}"]
        parts += [
            f"{name} {event[key]:.3f}"
            for key, name in (("score_mean", "score"), ("loss", "loss"), ("staleness_mean", "staleness"))
            if _number(event.get(key))
        ]
        parts += [f"{event['target_tokens']} target tokens"] if "target_tokens" in event else []
        parts += [f"{event['seconds']:.1f} s"] if _number(event.get("seconds")) else []
        return ", ".join(parts)
    if kind == "transfer":
        took = f" in {event['seconds']:.2f} s" if _number(event.get("seconds")) else ""
        return f"cell {event.get('cell')}: {event.get('from')} -> {event.get('to')}{took}"
    rest = " ".join(
        f"{key}={value}" for key, value in event.items() if key not in {"seq", "t", "kind"} and not isinstance(value, dict | list)
    )
    return f"{kind} {rest}".rstrip()


def printer(say: Callable[[str], None]) -> Callable[[list[dict[str, Any]]], None]:
    """Says each event's line, seconds since the printer was made in front. Of executions that were lost at once (a restart) it says one."""
    begun = time.time()

    def show(events: list[dict[str, Any]]) -> None:
        lost: Counter[str] = Counter()
        for event in events:
            line = describe(event)
            if event["kind"] == LOST:
                reason = str(event.get("reason"))
                lost[reason] += 1
                line = line if lost[reason] == 1 else None
            if line is not None:
                say(f"[{event['t'] - begun:7.1f}] {line}")
        for reason, count in lost.items():
            if count > 1:
                say(f"[{events[-1]['t'] - begun:7.1f}] {LOST} reason={reason}: {count - 1} more")

    return show


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
