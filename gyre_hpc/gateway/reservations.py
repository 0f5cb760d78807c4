"""What calls in flight of one execution may still sample, so that together they stay within its cap of tokens.

Invariant: what is granted and not given back never exceeds what is left of the cap. A call that wants more than is free waits for those in
flight, which mostly use less than they may: cut short by a neighbour's reservation it would end as an answer that the harness takes for
one that was too long. Alone, it gets what is left. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Reservations:
    """Of one execution."""

    def __init__(self) -> None:
        self.total = 0
        """Tokens granted to calls in flight."""
        self._returned = asyncio.Event()

    async def take(self, wanted: int, left: Callable[[], int]) -> int:
        """Reserve `wanted` tokens, or what is `left` (asked again after every wait; it raises once that is nothing). Waits for calls in
        flight, which end by themselves: no deadline of its own."""
        if self.total and wanted > left() - self.total:
            log.info("a call that may sample %d tokens waits: %d of %d are reserved for calls in flight", wanted, self.total, left())
        while self.total and wanted > left() - self.total:
            self._returned.clear()
            await self._returned.wait()
        granted = min(wanted, left())
        self.total += granted
        return granted

    def give_back(self, granted: int) -> None:
        """The call is over; what it sampled is no longer among what is left."""
        self.total -= granted
        self._returned.set()
