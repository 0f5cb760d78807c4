"""How rank 0 waits for others without standing still: generators that yield until an answer is there, each with a name and a deadline.

Ordering key: announcements (epochs) of all ranks in one order; questions to one leader beside them (cells/lines.py). Invariants: an answer
that does not come within its deadline is Resumable (epochs: nobody can go on without the others) or None (a question: the caller decides);
half of a deadline is logged; HTTP calls run in a few threads, for this one must go on polling MPI.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from cells.epochs import Channel
from cells.lines import Lines
from gyre_hpc.controller.messages import Message, encode
from gyre_hpc.errors import Resumable

logger = logging.getLogger(__name__)
T = TypeVar("T")
_AT_ONCE = 32
"""Calls of the gateway that run at the same time."""


class Asking:
    """The controller's ways to ask; made once."""

    def __init__(self, channel: Channel, lines: Lines) -> None:
        self.channel, self.lines = channel, lines
        self.http = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="control")

    def agree(self, message: Message, name: str, deadline: float | Callable[[], float]) -> Generator[None, None, list[dict[str, Any]]]:
        """Announce, and wait until every leader has acknowledged. Returns the leaders' reports in cell order. Raises Resumable.

        `deadline`: seconds from now; what gives them is asked at every look, for who works may need more than was known.
        """
        epoch = self.channel.announce(encode(message), agree=True)
        watch = _Watch(f"{name} (epoch {epoch})", deadline)
        while (reports := self.channel.reports(epoch)) is None:
            if watch.over():
                raise Resumable(
                    f"{name} was not acknowledged within {watch.seconds:.0f} s",
                    "see the cells' logs, or raise deadlines in the config; the same command resumes",
                )
            yield
        return reports

    def ask(self, cell: int, message: Message, name: str, deadline: float) -> Generator[None, None, dict[str, Any] | None]:
        """A question to the leader of one cell: its report, or None after `deadline` seconds."""
        number = self.lines.ask(cell + 1, encode(message))
        watch = _Watch(f"{name} (cell {cell})", deadline)
        while (answer := self.lines.answer_to(number)) is None:
            if watch.over():
                return None
            yield
        return answer

    def call(self, function: Callable[[], T]) -> Generator[None, None, T]:
        """A call of the gateway's control API."""
        (result,) = yield from self.calls([function])
        return result

    def calls(self, functions: Sequence[Callable[[], T]]) -> Generator[None, None, list[T]]:
        """Several at once, a bounded number of them at the same time; raises what the first that failed raised, when all are over."""
        futures: list[Future[T]] = [self.http.submit(function) for function in functions]
        while not all(future.done() for future in futures):
            yield
        return [future.result() for future in futures]


class _Watch:
    """One wait: warns at half of its time."""

    def __init__(self, name: str, deadline: float | Callable[[], float]) -> None:
        self._name, self._deadline = name, deadline
        self._began, self._warned = time.monotonic(), False

    @property
    def seconds(self) -> float:
        return self._deadline() if callable(self._deadline) else self._deadline

    def over(self) -> bool:
        waited, seconds = time.monotonic() - self._began, self.seconds
        if not self._warned and waited > seconds / 2:
            self._warned = True
            logger.warning("waiting for %s: %.0f s of %.0f s", self._name, waited, seconds)
        return waited > seconds
