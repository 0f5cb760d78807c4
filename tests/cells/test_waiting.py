from __future__ import annotations

import time

import pytest

from cells import waiting
from cells.waiting import DeadlineExceeded, wait


def test_returns_what_the_test_returns() -> None:
    answers = iter([None, False, None, 0])
    assert wait(lambda: next(answers), "the answer", 5.0, print) == 0


class Clock:
    """In place of the module `time`: goes on by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_deadline_names_itself_and_half_of_it_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    with pytest.raises(DeadlineExceeded, match=r"the core's gradient: not there after 0\.2 s"):
        wait(lambda: None, "the core's gradient", 0.2, lines.append)
    assert clock.now == pytest.approx(0.2)
    assert len(lines) == 1
    assert "the core's gradient" in lines[0]


def test_sleeps_instead_of_spinning() -> None:
    calls = 0

    def test() -> None:
        nonlocal calls
        calls += 1

    start = time.process_time()
    with pytest.raises(DeadlineExceeded):
        wait(test, "nothing", 0.3, lambda line: None)
    assert calls < 60
    assert time.process_time() - start < 0.1
