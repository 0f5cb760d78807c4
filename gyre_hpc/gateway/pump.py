"""The run's events from an event loop: `EventLog.emit` waits for the disk, so one thread does it, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gyre_hpc.events import EventLog


class EventPump:
    """`on_fatal` hears (in the pump's thread) of an event that could not be written."""

    def __init__(self, log: EventLog, on_fatal: Callable[[Exception], None]) -> None:
        self._log = log
        self._on_fatal = on_fatal
        self._thread = ThreadPoolExecutor(1, "events")

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Write an event soon; events are written in the order of the calls."""
        self._thread.submit(self._log.emit, kind, **fields).add_done_callback(self._check)

    def close(self) -> None:
        """Wait until all events are written."""
        self._thread.shutdown(wait=True)

    def _check(self, written: Future[int]) -> None:
        error = written.exception()
        if isinstance(error, Exception):
            self._on_fatal(error)
