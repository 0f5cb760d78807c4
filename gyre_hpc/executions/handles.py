"""A handle on a process that is not ours to wait for (the first process of a box): kill it, and learn of its death.

Invariant: on kernels with pidfd (5.3) the handle means that process and no later one of the same number; on older ones its number is
watched, which is safe as long as numbers are not used again within moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

_PAUSE = 0.005


class ProcessHandle:
    """One process, perhaps dead by now. Used from one event loop; `dead` closes it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        self._over = False
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._over = True
        except (OSError, AttributeError):  # an old kernel, or a Python that was built on one
            pass

    def kill(self) -> None:
        """SIGKILL; nothing when it is dead."""
        if self._over:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    async def dead(self) -> None:
        """Until it is dead (a zombie counts: it has no threads, files or children any more)."""
        if self._fd is not None:
            await _until_readable(self._fd)
            os.close(self._fd)
            self._fd, self._over = None, True
        while not self._over:
            self._over = _gone(self.pid)
            if not self._over:
                await asyncio.sleep(_PAUSE)


def _gone(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
