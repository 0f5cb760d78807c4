"""One call as its followers see it: a growing list of events that any number of HTTP responses read at their own pace.

Invariants: events are only appended; the last one is `Ended`, pushed after the call's record is durable, or the stream has an `error`;
a follower that is late (a retry that was coalesced, or a replay) reads the same list from its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyre_hpc.gateway.text.toolcalls import Piece


@dataclass(frozen=True)
class Started:
    """The call was accepted, its intent is durable. `call`: its id; `prompt_tokens`: the length of its prompt."""

    call: int
    prompt_tokens: int


@dataclass(frozen=True)
class Ended:
    """The call is over and durable. `stop_reason`: end_turn | tool_use | max_tokens; `tokens`: how many were sampled."""

    stop_reason: str
    tokens: int


Event = Started | Piece | Ended


class BadRequest(Exception):
    """The harness asked for something that can't be done; the text is for the harness (HTTP 400)."""


class Spent(BadRequest):
    """The execution has used up its calls or its tokens: no other request will do better."""


class PromptTooLong(BadRequest):
    """The prompt leaves no room for an answer. Dialects have a code of their own for it: harnesses compact by it."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {tokens} tokens > {limit} maximum")
        self.tokens = tokens
        self.limit = limit


class CallFailed(Exception):
    """The call broke on our side; what had been delivered is not a whole answer."""


class CallStream:
    """The events of one call. `abandon` is called when the last follower leaves before the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.abandoned = False
        self.on_abandon: Callable[[], object] = lambda: None
        self._followers = 0
        self._settled = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.error is not None or (bool(self.events) and isinstance(self.events[-1], Ended))

    def push(self, *events: Event) -> None:
        """Append events and wake the followers."""
        if events and self.error is None:
            self.events.extend(events)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream without an `Ended`."""
        if not self.done:
            self.error = error
            self._wake()

    async def after(self, index: int, timeout: float | None) -> Sequence[Event]:
        """Events from `index` on, as soon as there is one; empty after `timeout` seconds. Raises the stream's error once all are read."""
        if len(self.events) <= index and not self.done:
            await self._change(timeout)
        if len(self.events) > index:
            return self.events[index:]
        if self.error is not None:
            raise self.error
        return []

    def follow(self) -> None:
        """One more response reads this call."""
        self._followers += 1

    def leave(self) -> None:
        """A response is gone (finished or disconnected)."""
        self._followers -= 1
        if self._followers == 0 and not self.done:
            self.abandon()

    def abandon(self) -> None:
        """Nobody wants the rest; without effect once the call is `settled`."""
        if not self.abandoned and not self._settled:
            self.abandoned = True
            self.on_abandon()

    def settle(self) -> None:
        """All tokens are there (or will never be): what is left is to record them."""
        self._settled = True

    async def _change(self, timeout: float | None) -> None:
        """Until something is pushed, or `timeout` seconds are over. A future of its own for each follower: nobody's cancellation is
        another's, and it costs a tenth of `asyncio.wait`."""
        loop = asyncio.get_running_loop()
        changed = loop.create_future()
        self._waiting.append(changed)
        timer = None if timeout is None else loop.call_later(timeout, _set, changed)
        try:
            await changed
        finally:
            if timer is not None:
                timer.cancel()
            if changed in self._waiting:
                self._waiting.remove(changed)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            _set(changed)


def _set(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)
