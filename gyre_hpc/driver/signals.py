"""Signals as a flag that the driver's loop reads: the handler does nothing else, so no signal arrives at a bad moment.

SIGTERM (scancel, preemption, requeue), SIGINT (a person) and SIGHUP ask for a stop; SIGUSR1/SIGUSR2 are Slurm's and submitit's warning that
time is nearly up: a stop and a requeue. A second SIGINT asks to hurry; later ones change nothing, least of all the exit code.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TIME_UP = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Installed for the life of the driver (main thread only; elsewhere, as in a test, `request` takes the place of a signal).

    `last`: the process ends with the driver, so once a stop was asked for signals are ignored on the way out.
    """

    def __init__(self, last: bool = False) -> None:
        self._last = last
        self.received: list[signal.Signals] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP, *TIME_UP):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._last and self.received else handler)

    def request(self, number: signal.Signals) -> None:
        """As if the signal had come."""
        self.received.append(number)

    @property
    def stop(self) -> signal.Signals | None:
        """The first signal that came."""
        return self.received[0] if self.received else None

    @property
    def time_up(self) -> bool:
        return any(number in TIME_UP for number in self.received)

    @property
    def hurry(self) -> bool:
        return self.received.count(signal.SIGINT) > 1

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
