"""`RUN/live.json`: what is true now, replaced atomically about once a second, for `gyre status` and the progress display.

Decoration only: nothing reads it to decide. A reader that finds it stale (`t` older than a few seconds) says so.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


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


def read_live(path: Path) -> dict[str, Any] | None:
    """The last written fields, or None."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return fields
