"""How an attempt is asked to stop: the driver writes `stop` into its runtime folder, with the moment at which it ends what is left.

The controller looks for the file between two activities and uses the time as it can (controller/stopping.py). SIGTERM is no way to ask: a
scheduler that preempts sends it to every process of a step, also to those that have to end theirs in order. A rank that gets it while
nobody has asked yet leaves a `wish`, which the driver takes for a signal of its own, and goes on; behind the moment in the file it dies of
it. So does the gateway, without which neither a transfer nor a publication comes to its end (`Grace`). Invariants: both files appear whole;
the moment is in the driver's own clock, on whose node rank 0 and the gateway are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

NAME, WISH = "stop", "wish"
_SKEW = 1.0
"""Seconds by which another node's clock may be behind the driver's: a rank that took the end for its middle would have to be killed."""


def ask(folder: Path, seconds: float) -> None:
    """Everything is ended in so many seconds. Raises OSError."""
    _write(folder / NAME, f"{time.time() + seconds!r}\n")


def wish(folder: Path, who: str) -> None:
    """A process would have the attempt stop. Raises OSError."""
    _write(folder / WISH, who)


def wished(folder: Path) -> bool:
    """Whether one has."""
    return (folder / WISH).exists()


def withdraw(folder: Path) -> None:
    """Nobody is asked any more: those who were have ended, and others take their place."""
    for name in (NAME, WISH):
        (folder / name).unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    # ranks of all nodes get a scheduler's SIGTERM at once, and nodes that booted alike hand out the same pids
    partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}")
    partial.write_text(text)
    os.replace(partial, path)


class StopFile:
    """Of an attempt, for who obeys it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._path.exists()

    def soon(self) -> bool:
        """Whether one was, or will be: a process has passed SIGTERM on, and others may have died of it."""
        return self.asked() or wished(self._path.parent)

    def left(self) -> float:
        """Seconds until everything is ended, 0 or less where that moment has come; infinite while nobody has asked."""
        try:
            return float(self._path.read_text()) - time.time()
        except FileNotFoundError:
            return float("inf")
        except ValueError:  # made by hand
            return 0.0


class Stubborn:
    """SIGTERM in a rank. `install`: main thread only."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder, self._who = folder, who
        self._file = StopFile(folder)

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.passed_on():
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def asked(self) -> bool:
        """Whether the driver has asked for a stop, as far as can be seen. No error."""
        try:
            return self._file.asked()
        except OSError:
            return False

    def passed_on(self) -> bool:
        """Whether there is time and the driver knows, or will. No error may come out of a handler, in the middle of whatever goes on."""
        try:
            if self._file.left() <= _SKEW:
                return False
            if not self._file.asked() and not wished(self._folder):
                wish(self._folder, self._who)
        except OSError:  # the disk is full or can't be read, or the driver is gone and its folder with it
            return False
        return True


class Grace:
    """SIGTERM in the gateway: it goes on for those who need it until the driver ends it, or the moment in the stop file has come.

    A driver that does not ask within `patience` seconds never will. `clock` is monotonic.
    """

    def __init__(self, folder: Path, who: str, patience: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._term, self._patience, self._clock = Stubborn(folder, who), patience, clock
        self._since: float | None = None

    def over(self) -> bool:
        """To be asked at the signal, and a few times a second from then on: whether it is time to end."""
        self._since = self._clock() if self._since is None else self._since
        asked = self._term.asked()
        return not self._term.passed_on() or (not asked and self._clock() - self._since > self._patience)
