"""Whole files, durable or absent; and one writer per directory.

Invariants: a file written by `write_durably` is seen whole or not at all under its name, and is on the disk when the call returns;
a failure leaves nothing behind. A directory has at most one `WriterLock` holder; the lock of a process that is gone is taken over.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trees.errors import StoreError

LOCK = "writer.lock"
TEMPORARY = ".tmp-"
"""How the names of unfinished files begin; the next writer removes them."""


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte at `offset`, whatever the kernel takes at a time. Raises OSError (ENOSPC, EDQUOT, EIO)."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write `path` under a temporary name, fsync, rename, fsync the directory; returns its size. OSError leaves no trace."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        size = 0
        try:
            for part in parts:
                write_all(fd, part, size)
                size += len(part)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return size


def _start_of(pid: int) -> str | None:
    """When the process started, in clock ticks since boot (field 22 of /proc/PID/stat); None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class WriterLock:
    """A lock file that names its holder: host, boot, pid and the process's start. Not flock: many parallel file systems have none.

    Fence: `check` raises when the file is no longer ours, so that a writer that was wrongly thought dead can't go on.
    """

    def __init__(self, path: Path, *, take_over: bool = False) -> None:
        """Take the lock, or raise StoreError. `take_over`: also from a holder on another host, whose life can't be seen from here."""
        self.path = path
        pid = os.getpid()
        holder = {"host": socket.gethostname(), "boot": _boot_id(), "pid": pid, "start": _start_of(pid), "nonce": uuid.uuid4().hex}
        self._own = json.dumps(holder).encode()
        while not self._link():
            self._clear_stale(take_over)
        self.check()

    def check(self) -> None:
        """Raise StoreError if another writer has taken the lock."""
        if not self._ours():
            raise StoreError(f"{self.path} was taken by another writer", "only one process may write this directory: stop the other one")

    def release(self) -> None:
        """Give the lock back, if it is still ours."""
        if self._ours():
            self.path.unlink()

    def _ours(self) -> bool:
        # By content: inode numbers are used again at once.
        try:
            return self.path.read_bytes() == self._own
        except FileNotFoundError:
            return False

    def _link(self) -> bool:
        """Whole content under a new name, or not at all."""
        temporary = self.path.with_name(f"{TEMPORARY}{os.getpid()}-{self.path.name}")
        temporary.write_bytes(self._own)
        try:
            os.link(temporary, self.path)
        except (FileExistsError, FileNotFoundError):
            # Held; or its holder cleans up after its predecessor at this very moment. Look again.
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _clear_stale(self, take_over: bool) -> None:
        try:
            seen = self.path.read_bytes()
        except FileNotFoundError:
            return
        holder = _parse(seen)
        if not take_over and not _is_stale(holder):
            raise StoreError(
                f"{self.path} is held by process {holder.get('pid')} on {holder.get('host')}",
                f"stop that process, or remove {self.path.name} if it is gone",
            )
        # Move it aside first: of several that found it stale, one wins; if it was a fresh lock after all, it is put back.
        aside = self.path.with_name(f"{TEMPORARY}{os.getpid()}-stale-{self.path.name}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        try:
            if aside.read_bytes() != seen:
                os.link(aside, self.path)
        finally:
            aside.unlink()


def _parse(text: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_stale(holder: dict[str, Any]) -> bool:
    """The holder is known to be gone: on this host, and booted anew, ended, or its pid is another process's now."""
    if holder.get("host") != socket.gethostname():
        return not holder
    if holder.get("boot") != _boot_id():
        return True
    start = _start_of(int(holder.get("pid", -1)))
    return start is None or start != holder.get("start")
