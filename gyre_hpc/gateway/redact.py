"""Logs without secrets: whatever a library or an exception says of a request, no secret of an execution or of an API gets into a log.

Invariant: a log line of the gateway's process holds no secret that came in a URL (`/x/<secret>/...`), as a key or as a bearer token. The
formatter sees to it, the last thing before the file, so it holds for tracebacks and for loggers of libraries too.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator

_SECRETS = (
    (re.compile(r"(/x/)[^/\s'\"\\?#]+"), r"\1***"),
    (re.compile(r"((?:Bearer|x-api-key['\"]?[:,=]\s*b?['\"]?)\s*)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(\d+-)[A-Za-z0-9_-]{32}(?![A-Za-z0-9_-])"), r"\1***"),
)


def redacted(text: str) -> str:
    """`text` with every secret replaced by `***`."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class Redacting(logging.Formatter):
    """The usual lines, redacted."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class LogFile(logging.FileHandler):
    """A file of log lines. When the disk is full lines are lost, and nothing else: the record's own error is what people hear."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def log_to(handler: logging.Handler, level: int = logging.INFO) -> Iterator[None]:
    """Send this process's log to `handler`, redacted, while the block lasts; then close it."""
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
