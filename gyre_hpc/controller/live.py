"""`RUN/live.json`: what is true now, replaced atomically about once a second, for `gyre status` and the progress display.

Decoration only: nothing reads it to decide. A reader that finds it stale (`t` older than a few seconds) says so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from gyre_hpc.errors import GyreError

logger = logging.getLogger(__name__)


class LiveFile:
    """Writes the file at most every `period` seconds. A full disk here must not stop a run: the failure is returned, not raised."""

    def __init__(self, path: Path, period: float = 1.0) -> None:
        self.path = path
        self.period = period
        self._last = 0.0

    def due(self) -> bool:
        return time.monotonic() - self._last >= self.period

    def write(self, fields: dict[str, Any]) -> OSError | None:
        """Replace the file with `fields` and the time."""
        self._last = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"t": round(time.time(), 3), **fields}))
            os.replace(temporary, self.path)
        except OSError as error:
            return error
        return None


class Counts:
    """The gateway's own counts (GET /control/status), asked for in the background; `newest` also has `tokens_per_second`."""

    def __init__(self, ask: Callable[[], dict[str, Any]], pool: Executor) -> None:
        self.newest: dict[str, Any] = {}
        self._ask, self._pool = ask, pool
        self._asked: Future[None] | None = None
        self._tokens = (time.monotonic(), 0)

    def refresh(self) -> None:
        """Ask again, unless the last question still waits for its answer."""
        if self._asked is None or self._asked.done():
            self._asked = self._pool.submit(self._refresh)

    def _refresh(self) -> None:
        try:
            counts = self._ask()
        except GyreError as error:  # the follower of changes decides whether the gateway is lost
            logger.warning("gateway status: %s", error)
            return
        now, tokens = time.monotonic(), int(counts.get("tokens", 0))
        then, before = self._tokens
        self._tokens = (now, tokens)
        self.newest = {**counts, "tokens_per_second": round((tokens - before) / max(1e-3, now - then), 1)}


def read_live(path: Path) -> dict[str, Any] | None:
    """The last written fields, or None."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return fields
