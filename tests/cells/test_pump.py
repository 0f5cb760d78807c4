from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cells.pump import Pump

LONG = 30.0


def test_turns_are_taken_while_the_body_runs_and_none_after() -> None:
    enough, count = threading.Event(), 0

    def turn() -> None:
        nonlocal count
        count += 1
        if count >= 3:
            enough.set()

    pump = Pump(turn, 0.001)
    with pump.working():
        assert enough.wait(LONG), "the body ends only by a turn"
    at = count
    assert not [thread for thread in threading.enumerate() if thread.name == "pump"]
    enough.clear()
    with pump.working():
        assert enough.wait(LONG)
    assert count > at


def test_no_turn_is_under_way_when_the_body_is_over() -> None:
    inside, may_end, left = threading.Event(), threading.Event(), False

    def turn() -> None:
        inside.set()
        may_end.wait(LONG)
        assert not left

    with Pump(turn, 0.001).working():
        assert inside.wait(LONG)
        threading.Timer(0.05, may_end.set).start()
    left = True
    assert may_end.is_set()


def test_a_short_body_has_no_turn() -> None:
    turns: list[int] = []
    pump = Pump(lambda: turns.append(1), LONG)
    for _ in range(3):
        with pump.working():
            pass
    assert not turns


def _computed(turn: Callable[[], None], body: Callable[[], None]) -> None:
    with Pump(turn, 0.001).working():
        body()


def test_what_a_turn_raises_is_raised_when_the_body_is_over() -> None:
    done, seen = threading.Event(), []

    def turn() -> None:
        done.set()
        raise RuntimeError("the world is gone")

    def body() -> None:
        assert done.wait(LONG)
        seen.append("to its end")

    with pytest.raises(RuntimeError, match="the world is gone"):
        _computed(turn, body)
    assert seen == ["to its end"]


def test_the_body_s_own_failure_comes_first() -> None:
    done = threading.Event()

    def turn() -> None:
        done.set()
        raise RuntimeError("a turn")

    def body() -> None:
        assert done.wait(LONG)
        raise ValueError("the body")

    with pytest.raises(ValueError, match="the body"):
        _computed(turn, body)
