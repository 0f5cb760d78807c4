"""Group commit on an event loop: many calls, one fsync.

Invariant: what was appended before `commit()` was called is durable when it returns. One commit runs at a time, in a thread of its own; all
who ask in one pass of the event loop, or meanwhile, share one. A store that can't be written is told once to `on_fatal`, and to everybody
who waits. Futures and a queue in place of tasks and an executor: two commits are in every call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from gyre_hpc.gateway.calls import CallFailed
from trees.errors import StoreError
from trees.store import StoreWriter


class Committer:
    """Group commit: everything appended before `commit()` is durable when it returns; one fsync at a time, shared."""

    def __init__(self, store: StoreWriter, on_fatal: Callable[[Exception], None]) -> None:
        self._store = store
        self._on_fatal = on_fatal
        self._asked: SimpleQueue[tuple[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="commit", daemon=True)
        self._thread.start()
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []
        """Who waits for the next commit."""
        self._busy = False
        """A commit runs, or is about to."""
        self.commits = 0

    async def commit(self) -> None:
        """Raises CallFailed when the store can't be written any more (and `on_fatal` has been told)."""
        loop = asyncio.get_running_loop()
        durable = loop.create_future()
        self._waiting.append(durable)
        if not self._busy:
            self._busy = True
            loop.call_soon(self._begin, loop)
        await durable

    def close(self) -> None:
        """Wait for the commit that runs; there is none afterwards."""
        self._closed = True
        self._asked.put(None)
        self._thread.join()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = self._waiting, []
        if self._closed:
            self._finish(loop, waiting, RuntimeError("a commit after the end"))
        else:
            self._asked.put((loop, waiting))

    def _serve(self) -> None:
        """The thread."""
        while (asked := self._asked.get()) is not None:
            failed: Exception | None = None
            try:
                self._store.commit()
            except Exception as error:
                failed = error
            loop, waiting = asked
            loop.call_soon_threadsafe(self._finish, loop, waiting, failed)

    def _finish(self, loop: asyncio.AbstractEventLoop, waiting: list[asyncio.Future[None]], error: Exception | None) -> None:
        failure = error
        if error is None:
            self.commits += 1
        elif isinstance(error, OSError | StoreError):
            self._on_fatal(error)
            failure = CallFailed(f"the record can't be written: {error}")
            failure.__cause__ = error
        for durable in waiting:
            if durable.done():  # cancelled
                continue
            if failure is None:
                durable.set_result(None)
            else:
                durable.set_exception(failure)
        if self._waiting:
            self._begin(loop)
        else:
            self._busy = False
