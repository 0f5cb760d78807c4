"""The gateway's ledger as it goes on: a thread asks for what is new and waits there, the controller takes what has come.

Ordering key: the ledger's own number of a change; each is taken once, in order. Whatever ends the thread is raised to who takes next, so a
gateway that is gone is never silence.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from gyre_hpc.errors import Resumable
from gyre_hpc.gateway.client import ControlClient

_WAIT = 2.0
"""Seconds that one question may wait at the gateway for something new."""


class Changes:
    """Those behind a number that `follow` is given."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._come: queue.Queue[list[dict[str, Any]] | BaseException] = queue.Queue()

    def follow(self, after: int) -> None:
        """Ask from now on for what comes behind change `after`."""
        threading.Thread(target=self._follow, args=(after,), name="changes", daemon=True).start()

    def take(self) -> Iterator[dict[str, Any]]:
        """What has come, without waiting. Raises Resumable once the gateway does not answer."""
        while True:
            try:
                changes = self._come.get_nowait()
            except queue.Empty:
                return
            if isinstance(changes, BaseException):
                raise Resumable(f"the gateway does not answer: {changes}", "see gateway.log; the same command resumes") from changes
            yield from changes

    def _follow(self, after: int) -> None:
        try:
            while True:
                after, changes = self._client.changes(after, wait=_WAIT)
                if changes:
                    self._come.put(changes)
        except BaseException as error:
            self._come.put(error)
