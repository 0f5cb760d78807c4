"""Ends the boxes of a supervisor that died without ending them.

Why bwrap's own --die-with-parent is not enough: it is asked for while the box is being made. A supervisor killed before that leaves a
bwrap that knows of no parent; a bwrap killed in the middle leaves its half, which waits for it for ever, or goes on and runs the program
to its end. At a boundary dozens of boxes are being made at once.

Invariants: a warden outlives its supervisor, whose death it learns by the end of a pipe that nobody else holds; it kills what carries the
supervisor's own mark in its environment, and nothing else; it goes on until it has found nothing `QUIET` times in a row, for a process
that was only forked shows its mark once it has executed, and ends then. After an orderly end it is told that there is nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from gyre_hpc import processes

MARK = "GYRE_BOXES"
"""The variable that a supervisor's boxes carry outside of the box (sandbox.py)."""
QUIET = 5
_ORDERLY = b"."
_PAUSE = 0.1
_LONGEST = 60.0


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """While inside, whatever this process starts carries a mark of its own, and ends with it however it dies. Raises OSError."""
    mark = uuid.uuid4().hex
    warden = subprocess.Popen(processes.python("gyre_hpc.executions.warden", mark), stdin=subprocess.PIPE, start_new_session=True, cwd="/")
    assert warden.stdin is not None
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
        with contextlib.suppress(OSError):  # somebody killed it
            warden.stdin.write(_ORDERLY)
            warden.stdin.close()
        warden.wait()


def marked(mark: str) -> list[int]:
    """Pids that carry the mark, but for our own."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or not ours
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def end(mark: str) -> int:
    """Kill all that carries the mark until there is nothing more. How many that were."""
    killed: set[int] = set()
    quiet, last = 0, time.monotonic() + _LONGEST
    while quiet < QUIET and time.monotonic() < last:
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        quiet = 0 if found else quiet + 1
        time.sleep(_PAUSE)
    return len(killed)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to everything at once: the supervisor ends in its own time, and we after it
    if os.read(0, 1) == _ORDERLY:
        return 0
    count = end(sys.argv[1])
    if count:
        print(f"the supervisor died: {count} processes of its boxes ended", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
