"""The run's event log, `events.jsonl`: one JSON object a line, `{"seq", "t", "kind", ...}` (contract).

Ordering key: `seq`, dense from 0. `t` (seconds since the epoch) is decoration: clocks of nodes differ.
Invariants: a line is whole or absent to every reader (a torn tail is cut by the next writer and skipped by readers);
an event is durable (fsync) when `emit` returns. Several processes of the first node write (driver, gateway, controller);
they take turns by a lock in the node's own temporary folder, because flock is not to be had on every parallel file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gyre_hpc.errors import GyreError

_TAIL = 1 << 16


class EventLog:
    """Appends events to one file. Safe for several processes of one node; not for several nodes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
        self._lock_path = Path(tempfile.gettempdir()) / f"gyre-events-{os.getuid()}-{digest}.lock"

    def emit(self, kind: str, **fields: Any) -> int:
        """Write one event durably; returns its `seq`. OSError (a full disk, say) reaches the caller, nothing half-written stays."""
        with self._turn():
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                end, seq = _whole_end(fd, self.path)
                line = json.dumps({"seq": seq, "t": round(time.time(), 3), "kind": kind, **fields}) + "\n"
                os.ftruncate(fd, end)
                try:
                    _write_all(fd, line.encode(), end)
                    os.fsync(fd)
                except OSError:
                    os.ftruncate(fd, end)
                    raise
                return seq
            finally:
                os.close(fd)

    def forget(self) -> None:
        """Remove the node's lock file: what the last writer does when a run rests. A writer that comes by makes a new one."""
        with self._turn():
            self._lock_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock file that has the name now; one that was removed while we waited for it locks out nobody."""
        while True:
            with open(self._lock_path, "a+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _has_name(lock, self._lock_path):
                    yield
                    return


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _parse(path: Path, line: bytes, offset: int) -> dict[str, Any]:
    """One whole line at byte `offset`. Raises GyreError if it is no event: somebody else wrote there."""
    try:
        event = json.loads(line)
        if isinstance(event, dict) and isinstance(event["seq"], int) and isinstance(event["kind"], str):
            return event
    except (ValueError, KeyError):
        pass
    raise GyreError(f"{path} is damaged at byte {offset}: a line that is no event", "take that line out, or restore the file from a copy")


def read_events(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """All whole events with `seq >= start`, in order. A missing file has none; works while others write."""
    if not path.exists():
        return
    offset = 0
    with open(path, "rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                return
            event = _parse(path, line, offset)
            offset += len(line)
            if event["seq"] >= start:
                yield event


class EventTail:
    """Reads what is new since the last call, at a cost that grows with what is new only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The whole events appended since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as f:
            f.seek(self._offset)
            data = f.read()
        whole = data[: data.rfind(b"\n") + 1]
        found = []
        for line in whole.splitlines(keepends=True):
            found.append(_parse(self.path, line, self._offset))
            self._offset += len(line)
        return found


def _write_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _whole_end(fd: int, path: Path) -> tuple[int, int]:
    """Where the last whole line ends, and the next seq."""
    size = os.fstat(fd).st_size
    span = _TAIL
    while True:
        start = max(0, size - span)
        tail = os.pread(fd, size - start, start)
        last = tail.rfind(b"\n")
        if last < 0:
            if start == 0:
                return 0, 0
        else:
            before = tail.rfind(b"\n", 0, last)
            if before >= 0 or start == 0:
                event = _parse(path, tail[before + 1 : last], start + before + 1)
                return start + last + 1, int(event["seq"]) + 1
        span *= 4
