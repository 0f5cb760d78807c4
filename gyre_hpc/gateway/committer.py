"""Group commit on an event loop: many calls, one fsync.

Invariant: what was appended before `commit()` was called is durable when it returns. One commit runs at a time, in a thread of its own; all
who ask meanwhile share the next one. A store that can't be written is told once to `on_fatal`, and to everybody who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gyre_hpc.gateway.calls import CallFailed
from trees.errors import StoreError
from trees.store import StoreWriter


class Committer:
    """Group commit: everything appended before `commit()` is durable when it returns; one fsync at a time, shared."""

    def __init__(self, store: StoreWriter, on_fatal: Callable[[Exception], None]) -> None:
        self._store = store
        self._on_fatal = on_fatal
        self._thread = ThreadPoolExecutor(1, "commit")
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self.commits = 0

    async def commit(self) -> None:
        """Raises CallFailed when the store can't be written any more (and `on_fatal` has been told)."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
        await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.commit)
            self.commits += 1
        except (OSError, StoreError) as error:
            self._on_fatal(error)
            raise CallFailed(f"the record can't be written: {error}") from error

    def close(self) -> None:
        self._thread.shutdown(wait=True)
