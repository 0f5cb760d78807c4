"""What happened in the ledger, in order, for whoever follows it: a log of changes with dense sequence numbers from 1.

Invariant: a change is visible only after the records behind it are durable. Changes are *staged* when the ledger's state moves and
*published*, in the order in which they were staged, once the commit that covers them has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Change = dict[str, Any]
RETAINED = 1 << 17
"""Changes that are kept. A reader that fell further behind must read the frontier again."""


class TooFarBehind(Exception):
    """The changes that a reader asks for are not kept any more."""


class ChangeLog:
    """`emit(kind, fields)` hears of every event when it is published."""

    def __init__(self, emit: Callable[[str, dict[str, Any]], None], retained: int = RETAINED) -> None:
        self._emit = emit
        self._staged: deque[tuple[Change | None, tuple[str, dict[str, Any]] | None]] = deque()
        self._staged_ever = 0
        self._published_ever = 0
        self._log: deque[Change] = deque(maxlen=retained)
        self.last = 0
        """Sequence number of the newest published change."""

    def stage(self, change: Change | None, event: tuple[str, dict[str, Any]] | None = None) -> None:
        """A change of state whose records were appended, not committed; and the run's event that tells of it."""
        self._staged.append((change, event))
        self._staged_ever += 1

    def mark(self) -> int:
        """Where the staged changes end now: take it before a commit, give it to `publish` after."""
        return self._staged_ever

    def publish(self, mark: int) -> bool:
        """Everything staged before `mark` is durable. Returns whether that was new to readers."""
        before = self._published_ever
        while self._published_ever < mark:
            change, event = self._staged.popleft()
            self._published_ever += 1
            if change is not None:
                self.last += 1
                self._log.append({"seq": self.last, **change})
            if event is not None:
                self._emit(*event)
        return self._published_ever > before

    def after(self, seq: int) -> list[Change]:
        """Published changes later than `seq` (0: all that are kept). Raises TooFarBehind."""
        oldest = self.last - len(self._log) + 1
        if 0 < seq < oldest - 1:
            raise TooFarBehind(f"changes after {seq} are asked for, kept are {oldest} to {self.last}")
        return [self._log[i] for i in range(max(0, seq - oldest + 1), len(self._log))]
