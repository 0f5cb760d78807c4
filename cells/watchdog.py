"""The deadline of what can only be waited for inside MPI (or another library that blocks): a flush of RMA, a collective setup, an end.

Such a call can't be taken back; so where it takes too long a thread beside it calls `give_up`, which is to end the process. It is
also how such a wait gets a name, and its line in the log at half time. Invariants: one thread at most, which calls neither MPI nor
anything else of the owner's; being watched costs the owner two assignments, no thread and no system call; `give_up` is called once.
Waits nest: the inner one's end is its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Watch = Callable[[str, float], AbstractContextManager[None]]
"""(name, seconds) -> what is entered around the call."""
_LOOK = 0.5
"""Seconds between two looks: a deadline is noticed so much late."""


class Watchdog:
    """Of one process; `watch` is for one thread alone. `give_up(name, seconds)` is called in the watching thread; `look`: for tests."""

    def __init__(self, give_up: Callable[[str, float], None], log: Callable[[str], None], look: float = _LOOK) -> None:
        self._give_up, self._log, self._look = give_up, log, look
        self._open: list[_Watched] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, name: str, seconds: float) -> Iterator[None]:
        """The body has `seconds`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        self._open.append(_Watched(name, seconds))
        try:
            yield
        finally:
            self._open.pop()

    def _run(self) -> None:
        while True:
            time.sleep(self._look)
            now = time.monotonic()
            for watched in tuple(self._open):
                gone = now - watched.began
                if gone >= watched.seconds:
                    self._give_up(watched.name, watched.seconds)
                    return
                if not watched.told and gone >= watched.seconds / 2:
                    watched.told = True
                    self._log(f"waiting for {watched.name}: {gone:.1f} s of {watched.seconds:g} s")


class _Watched:
    __slots__ = ("began", "name", "seconds", "told")

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds, self.began, self.told = name, seconds, time.monotonic(), False
