"""Waits of the driver: each has a name, a deadline and a log line at half time; none is for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from gyre_hpc.errors import Resumable

T = TypeVar("T")
log = logging.getLogger("gyre.driver")


def wait_for(name: str, condition: Callable[[], T | None], deadline: float, poll: float = 0.05) -> T:
    """Poll until `condition` gives something true; returns that. Raises Resumable after `deadline` seconds, and what `condition` raises."""
    begun = time.monotonic()
    said = False
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - begun
        if waited >= deadline:
            raise Resumable(
                f"waited {deadline:.0f} s for {name}", "see the logs of this attempt; deadlines.* in the configuration are the limits"
            )
        if not said and waited >= deadline / 2:
            said = True
            log.warning("still waiting for %s after %.0f s (deadline %.0f s)", name, waited, deadline)
        time.sleep(poll)
