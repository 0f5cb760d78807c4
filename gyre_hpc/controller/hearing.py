"""What a rank hears of its announcements: in epoch order, also while it computes.

Invariants: what is not settled waits here, in order, until the rank takes it; what is settled (nothing changes for this rank by it) is
acknowledged as soon as it is heard, but not while something earlier waits or is being followed, for that may change what is settled. More
work can't: with streaming it comes all the time, and would hold a change of the prefix up until the micro-step's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cells.epochs import Channel
from gyre_hpc.controller.messages import Message, Work, decode


@dataclass(frozen=True)
class Heard:
    """One announcement; `raw` as it came. `agree`: the root waits for an acknowledgement of `epoch`."""

    epoch: int
    message: Message
    raw: dict[str, Any]
    agree: bool


class Hearing:
    """A follower's ear at `channel`; `settled` tells of a message whether it changes nothing here."""

    def __init__(self, channel: Channel, settled: Callable[[Message], bool]) -> None:
        self._channel, self._settled = channel, settled
        self._waiting: deque[Heard] = deque()
        self._following = False

    def listen(self) -> None:
        """Take in what has come; does not wait."""
        while (announcement := self._channel.poll()) is not None:
            message = decode(announcement.message)
            if not self._following and all(isinstance(earlier.message, Work) for earlier in self._waiting) and self._settled(message):
                if announcement.agree:
                    self._channel.acknowledge(announcement.epoch)
                continue
            self._waiting.append(Heard(announcement.epoch, message, announcement.message, announcement.agree))

    def ahead(self, kinds: type[Message] | tuple[type[Message], ...]) -> bool:
        """Whether such a message has come that nobody has taken yet."""
        return any(isinstance(heard.message, kinds) for heard in tuple(self._waiting))

    def take(self) -> Heard | None:
        """The next that is to be followed, if there is one; the one before has been."""
        self._following = False
        self.listen()
        if not self._waiting:
            return None
        self._following = True
        return self._waiting.popleft()
