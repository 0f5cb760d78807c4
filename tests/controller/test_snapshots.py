"""Weights between the core and a satellite over a wire that delivers when it is told to (a fake in place of MPI)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from cells.waiting import DeadlineExceeded
from gyre_hpc.controller.snapshots import Snapshots


class FakeRequest:
    def __init__(self) -> None:
        self.done = False

    def Test(self) -> bool:
        return self.done


class FakeWire:
    """One sender, one receiver; messages match receives in order, as MPI's do."""

    def __init__(self) -> None:
        self.open = True
        self._sent: list[tuple[FakeRequest, NDArray[np.float32]]] = []
        self._wanted: list[tuple[FakeRequest, NDArray[np.float32]]] = []

    def Isend(self, data: NDArray[np.float32], to: int, tag: int) -> FakeRequest:
        self._sent.append((FakeRequest(), data))
        self.deliver()
        return self._sent[-1][0] if self._sent else self._done()

    def Irecv(self, buffer: NDArray[np.float32], source: int, tag: int) -> FakeRequest:
        request = FakeRequest()
        self._wanted.append((request, buffer))
        self.deliver()
        return request

    def deliver(self) -> None:
        while self.open and self._sent and self._wanted:
            (sent, data), (wanted, buffer) = self._sent.pop(0), self._wanted.pop(0)
            buffer[:] = data
            sent.done = wanted.done = True

    @staticmethod
    def _done() -> FakeRequest:
        request = FakeRequest()
        request.done = True
        return request


def pair() -> tuple[FakeWire, Snapshots, Snapshots]:
    wire = FakeWire()
    return wire, Snapshots(cast(Any, wire)), Snapshots(cast(Any, wire))


def weights(version: int) -> NDArray[np.float32]:
    return np.full(3, version, np.float32)


def test_what_was_lent_last_is_pulled() -> None:
    _, core, satellite = pair()
    core.lend(weights(1), 1)
    assert satellite.pull(3, 1.0).tolist() == [1.0] * 3
    core.lend(weights(2), 1)
    assert satellite.pull(3, 1.0).tolist() == [2.0] * 3


def test_pulls_that_were_given_up_do_not_make_the_next_one_old() -> None:
    wire, core, satellite = pair()
    wire.open = False
    for version in (1, 2):
        core.lend(weights(version), 1)
        with pytest.raises(DeadlineExceeded):
            satellite.pull(3, 0.0)
    assert not satellite.progress()
    wire.open = True
    core.lend(weights(3), 1)
    assert satellite.pull(3, 1.0).tolist() == [3.0] * 3
    assert satellite.progress(), "nothing is left to come"
    core.lend(weights(4), 1)
    assert satellite.pull(3, 1.0).tolist() == [4.0] * 3
