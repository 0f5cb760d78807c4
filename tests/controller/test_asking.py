"""Waits of rank 0: answers, deadlines, several calls at once."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, TypeVar, cast

import pytest

from cells.epochs import Channel
from cells.lines import Lines
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command, Prefix
from gyre_hpc.errors import Resumable

T = TypeVar("T")


class FakeRanks:
    """In place of a channel and of lines: answers come after so many looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.heard: list[Any] = []

    def _look(self, answer: T) -> T | None:
        if self.looks is None or self.looks > 0:
            self.looks = None if self.looks is None else self.looks - 1
            return None
        return answer

    def announce(self, message: dict[str, Any], agree: bool) -> int:
        self.heard.append(message["kind"])
        return 7

    def reports(self, epoch: int) -> list[dict[str, Any]] | None:
        return self._look([{"epoch": epoch}])

    def ask(self, rank: int, message: dict[str, Any]) -> int:
        self.heard.append((rank, message["what"]))
        return 3

    def answer_to(self, number: int) -> dict[str, Any] | None:
        return self._look({"number": number})


def asking(looks: int | None) -> tuple[Asking, FakeRanks]:
    ranks = FakeRanks(looks)
    return Asking(cast(Channel, ranks), cast(Lines, ranks)), ranks


def ended(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(T, stop.value)


COMMAND = Command("where", 0, "", 1.0)


def test_answers_are_waited_for() -> None:
    ask, ranks = asking(3)
    assert ended(ask.agree(Prefix(1), "a prefix", 60.0)) == [{"epoch": 7}]
    assert ended(ask.ask(2, COMMAND, "where", 60.0)) == {"number": 3}
    assert ranks.heard == ["Prefix", (3, "where")], "rank k + 1 leads cell k"


def test_silence_is_resumable_of_all_and_none_of_one() -> None:
    ask, _ = asking(None)
    with pytest.raises(Resumable, match=r"a prefix was not acknowledged within 0 s"):
        ended(ask.agree(Prefix(1), "a prefix", 0.01))
    assert ended(ask.ask(0, COMMAND, "where", 0.01)) is None


def test_calls_run_at_the_same_time_and_their_results_keep_their_order() -> None:
    ask, _ = asking(0)
    together = threading.Barrier(3, timeout=10)

    def call(n: int) -> int:
        together.wait()
        return n

    assert ended(ask.calls([lambda n=n: call(n) for n in range(3)])) == [0, 1, 2]  # type: ignore[misc]
    with pytest.raises(ValueError, match="no"):
        ended(ask.call(lambda: int("no")))
