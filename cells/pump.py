"""MPI goes on while a rank computes: a thread takes its turns for as long as the rank's own one is busy with something else.

Why: what others send, ask or reduce moves only while a rank is inside MPI. One that looks between two micro-steps keeps the root waiting
for its answer, and in MPI's trees holds up all below it: a change of the prefix, which needs everybody's answer, took up to five
micro-steps, and a micro-step of a long context takes minutes.

Invariants: MPI hears of one thread at a time (MPI_THREAD_SERIALIZED): a turn is taken only inside `working`, in whose body the owner calls
nothing of MPI, and no turn is under way when that is left; what a turn raises is raised there. A body that is shorter than `pause` costs a
thread's start and end, no turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_PAUSE = 0.02
"""Seconds between two turns."""


class Pump:
    """`turn` must not block; it is called every `pause` seconds."""

    def __init__(self, turn: Callable[[], None], pause: float = _PAUSE) -> None:
        self._turn, self._pause = turn, pause

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The body computes, and calls nothing of MPI."""
        over, failed = threading.Event(), list[BaseException]()
        thread = threading.Thread(target=self._run, args=(over, failed), name="pump", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failed:
            raise failed[0]

    def _run(self, over: threading.Event, failed: list[BaseException]) -> None:
        try:
            while not over.wait(self._pause):
                self._turn()
        except BaseException as error:  # for the owner
            failed.append(error)
