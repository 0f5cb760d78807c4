"""Calls in flight together stay within the cap of their execution, and none is cut for a reservation that is not used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.calls import Ended, Spent, Started
from gyre_hpc.gateway.recorder import RecorderSettings
from gyre_hpc.gateway.reservations import Reservations
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import bench
from tests.gateway.test_recorder import finished, request, say


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), max_size=12), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_no_order_of_calls_passes_the_cap(cap: int, calls: list[tuple[int, float]], turns: int) -> None:
    """Each call samples some part of what it was granted, after a few turns of the loop; who is refused finds nothing left."""
    spent, refused = 0, 0

    def left() -> int:
        if spent >= cap:
            raise Spent("all")
        return cap - spent

    async def one(reserved: Reservations, wanted: int, part: float) -> None:
        nonlocal spent, refused
        try:
            granted = await reserved.take(wanted, left)
        except Spent:
            refused += 1
            return
        assert 1 <= granted <= wanted
        assert spent + reserved.total <= cap
        for _ in range(turns):
            await asyncio.sleep(0)
        spent += round(granted * part)
        reserved.give_back(granted)

    async def all_of_them() -> None:
        reserved = Reservations()
        async with asyncio.timeout(10):
            await asyncio.gather(*(one(reserved, *call) for call in calls))
        assert reserved.total == 0

    asyncio.run(all_of_them())
    assert spent <= cap
    assert not refused or spent == cap


async def test_a_call_that_does_not_fit_waits_for_those_in_flight(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with bench(tmp_path / "t", renderer, RecorderSettings(seed=0, window=400, max_tokens=10)) as b:
        b.engine.gate.clear()
        b.engine.replies += ["four", "x", "123456789"]
        first = b.recorder.open(0, request(say("first"), max_tokens=8))
        while not b.engine.said:
            await asyncio.sleep(0.01)
        waits = b.recorder.open(0, request(say("waits"), max_tokens=6))
        fits = b.recorder.open(0, request(say("fits"), max_tokens=2))
        while len(b.engine.said) < 2:
            await asyncio.sleep(0.01)
        assert [asked.sampling.max_tokens for asked in b.engine.seen] == [8, 2]
        assert not waits.events
        b.engine.gate.set()
        for stream in (first, fits, waits):
            await finished(stream)
        assert b.engine.seen[2].sampling.max_tokens == 3  # five and two tokens are spent, nothing is reserved any more
        assert b.recorder.usage(0) == (3, 10)
        with pytest.raises(Spent):
            await finished(b.recorder.open(0, request(say("more"))))


async def test_who_leaves_while_its_call_waits_leaves_nothing(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with bench(tmp_path / "t", renderer, RecorderSettings(seed=0, window=400, max_tokens=10)) as b:
        b.engine.gate.clear()
        b.engine.replies += ["four", "four"]
        first = b.recorder.open(0, request(say("first"), max_tokens=10))
        while not b.engine.said:
            await asyncio.sleep(0.01)
        waits = b.recorder.open(0, request(say("waits")))
        waits.follow()
        await asyncio.sleep(0)
        waits.leave()
        b.engine.gate.set()
        assert [type(event) for event in (await finished(first)).events][:: len(first.events) - 1] == [Started, Ended]
        again = await finished(b.recorder.open(0, request(say("waits"))))
        assert isinstance(again.events[-1], Ended)
        assert len(b.engine.seen) == 2
        assert all(call.fate is not None for call in b.tree().calls.values())
