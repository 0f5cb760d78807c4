from __future__ import annotations

import time

import pytest

from cells.waiting import DeadlineExceeded, wait


def test_returns_what_the_test_returns() -> None:
    answers = iter([None, False, None, 0])
    assert wait(lambda: next(answers), "the answer", 5.0, print) == 0


def test_deadline_names_itself_and_half_of_it_is_logged_once() -> None:
    lines: list[str] = []
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"the core's gradient: not there after 0\.2 s"):
        wait(lambda: None, "the core's gradient", 0.2, lines.append)
    assert 0.2 <= time.monotonic() - start < 1.0
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
