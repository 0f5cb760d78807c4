"""Every wait has a name, a deadline and a log line, and sleeps: a rank that spins takes a core from the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONGEST_SLEEP = 0.02
_FIRST_SLEEP = 0.0002


class DeadlineExceeded(Exception):
    """What was waited for did not come in time."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name}: not there after {seconds:g} s")
        self.name = name
        self.seconds = seconds


def wait(test: Callable[[], T], name: str, deadline: float, log: Callable[[str], None]) -> T:
    """Call `test` until it returns something other than None or False, and return that.

    Sleeps between tries, from 0.2 ms up to 20 ms. Logs once when half of `deadline` (seconds) is gone; raises DeadlineExceeded when all
    of it is.
    """
    start = time.monotonic()
    sleep = _FIRST_SLEEP
    told = False
    while True:
        value = test()
        if value is not None and value is not False:
            return value
        gone = time.monotonic() - start
        if gone >= deadline:
            raise DeadlineExceeded(name, deadline)
        if not told and gone >= deadline / 2:
            told = True
            log(f"waiting for {name}: {gone:.1f} s of {deadline:g} s")
        time.sleep(min(sleep, LONGEST_SLEEP, deadline - gone))
        sleep *= 1.5
