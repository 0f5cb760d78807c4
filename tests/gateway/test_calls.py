"""A call's stream: late followers, leaving, failing."""

from __future__ import annotations

import asyncio

import pytest

from gyre_hpc.gateway.calls import CallFailed, CallStream, Ended, Started
from gyre_hpc.gateway.text.toolcalls import TextPiece


async def test_every_follower_reads_everything_at_its_own_pace() -> None:
    stream = CallStream()
    waiting = asyncio.create_task(stream.after(0, 5))
    await asyncio.sleep(0)
    stream.push(Started(1, 2))
    stream.push(TextPiece("a"), Ended("end_turn", 1))
    assert list(await waiting) == [Started(1, 2), TextPiece("a"), Ended("end_turn", 1)]
    assert list(await stream.after(1, 5)) == [TextPiece("a"), Ended("end_turn", 1)]
    assert stream.done
    assert list(await stream.after(3, 5)) == []


async def test_a_wait_ends_empty_after_its_time() -> None:
    assert list(await CallStream().after(0, 0.01)) == []


async def test_a_failure_comes_after_what_was_pushed_and_nothing_after_it() -> None:
    stream = CallStream()
    stream.push(Started(1, 2))
    stream.fail(CallFailed("broke"))
    stream.push(Ended("end_turn", 1))
    assert list(await stream.after(0, 1)) == [Started(1, 2)]
    with pytest.raises(CallFailed):
        await stream.after(1, 1)


async def test_only_the_last_follower_that_leaves_before_the_end_abandons() -> None:
    heard: list[str] = []
    stream = CallStream()
    stream.on_abandon = lambda: heard.append("gone")
    stream.follow()
    stream.follow()
    stream.leave()
    assert not stream.abandoned
    stream.leave()
    assert stream.abandoned
    assert heard == ["gone"]
    settled = CallStream()
    settled.on_abandon = lambda: heard.append("never")
    settled.follow()
    settled.settle()
    settled.leave()
    assert not settled.abandoned
    assert heard == ["gone"]
