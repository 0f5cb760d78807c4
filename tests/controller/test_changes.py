"""Changes come in order, once each; an end of the thread is told and never silence."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from gyre_hpc.controller.changes import Changes
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.gateway.client import ControlClient


class Gateway:
    """Two answers, one empty one between them, then none (the outer edge)."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def changes(self, after: int, wait: float) -> tuple[int, list[dict[str, Any]]]:
        self.asked.append(after)
        if len(self.asked) > 3:
            raise GyreError("refused", "nothing")
        found: list[dict[str, Any]] = [] if after == 7 else [{"kind": "started", "n": after + 1}, {"kind": "ended", "n": after + 2}]
        return (after + 2, found) if found else (8, [])


def take_for(changes: Changes, seconds: float, taken: list[int]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for change in changes.take():
            taken.append(change["n"])
        time.sleep(0.001)


def test_changes_are_taken_in_order_and_the_end_is_told() -> None:
    gateway = Gateway()
    changes = Changes(cast(ControlClient, gateway))
    assert list(changes.take()) == []
    changes.follow(5)
    taken: list[int] = []
    with pytest.raises(Resumable, match="the gateway does not answer: refused"):
        take_for(changes, 10.0, taken)
    assert gateway.asked == [5, 7, 8, 10]
    assert taken == [6, 7, 9, 10]
