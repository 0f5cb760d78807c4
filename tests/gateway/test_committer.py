"""Group commit: who shares an fsync, what it covers, and who hears of a failure."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gyre_hpc.gateway.calls import CallFailed
from gyre_hpc.gateway.committer import Committer


class Store:
    """Fake writer: `durable` is what was appended when the last commit began; commits wait for `gate`."""

    def __init__(self) -> None:
        self.appended = self.durable = self.commits = 0
        self.gate = threading.Event()
        self.error: Exception | None = None

    def commit(self) -> None:
        covered = self.appended
        self.gate.wait(5)
        if self.error is not None:
            raise self.error
        self.durable, self.commits = covered, self.commits + 1


async def test_commits_are_shared_and_cover_what_was_appended_before() -> None:
    store: Any = Store()
    committer = Committer(store, lambda error: None)

    async def write() -> None:
        store.appended += 1
        mine = store.appended
        await committer.commit()
        assert store.durable >= mine

    first = asyncio.create_task(write())
    await asyncio.sleep(0.02)
    others = [asyncio.create_task(write()) for _ in range(20)]
    await asyncio.sleep(0.02)
    store.gate.set()
    await asyncio.gather(first, *others)
    assert store.commits == 2
    committer.close()


async def test_a_waiter_that_is_cancelled_does_not_stop_the_commit() -> None:
    store: Any = Store()
    committer = Committer(store, lambda error: None)
    one, other = (asyncio.create_task(committer.commit()) for _ in range(2))
    await asyncio.sleep(0.02)
    one.cancel()
    store.gate.set()
    await other
    assert one.cancelled() or one.cancelling()
    assert store.commits == 1
    committer.close()


async def test_everybody_hears_of_a_failure() -> None:
    store: Any = Store()
    store.error = OSError(28, "No space left on device")
    store.gate.set()
    fatal: list[Exception] = []
    committer = Committer(store, fatal.append)
    results = await asyncio.gather(*(committer.commit() for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, CallFailed) for result in results)
    assert fatal == [store.error]
    with pytest.raises(CallFailed):
        await committer.commit()
    committer.close()
