"""The driver's own log of an attempt, `driver.log`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("gyre.driver")


class _QuietHandler(logging.FileHandler):
    """A log that can't be written (a full disk) must not bury the one line that says so under tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What the driver logs goes there meanwhile."""
    handler = _QuietHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
