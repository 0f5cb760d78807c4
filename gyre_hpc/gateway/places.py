"""What the ledger holds of a group, place by place, and how it is told: to the controller, to trainers, in events.

An *index* of a group is one place in it; it is filled by one execution after the other (attempts) until one has *ended*. Invariant: what
is told of a place follows from its end alone, or from the execution that it has now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trees.records import Execution, ExecutionEnd, Group

LOST = "lost:"
"""What the reason of a lost attempt's end begins with in the store; the rest is one of these, or a failure of a supervisor's."""
NO_CALLS = "no-calls"
NODE = "node"
RESTART = "restart"
UNDELIVERED = "undelivered"
FREE = frozenset({RESTART, UNDELIVERED})
"""Losses of our own making, which cost an index nothing."""


@dataclass
class Place:
    """One index of a group."""

    attempts: int = 0
    live: int | None = None
    end: ExecutionEnd | None = None
    losses: Counter[str] = field(default_factory=Counter)

    @property
    def charged(self) -> int:
        """Tries that the budget nearest to its end has paid for."""
        return max((count for reason, count in self.losses.items() if reason not in FREE), default=0)


@dataclass
class Live:
    """An execution that a supervisor has; `started` by the ledger's clock."""

    record: Execution
    node: str
    started: float


@dataclass
class GroupState:
    """A group and its places."""

    record: Group
    places: list[Place]

    @property
    def valid(self) -> int | None:
        """How many ended as valid, None while an index is open."""
        ends = [place.end for place in self.places if place.end is not None]
        return sum(end.valid for end in ends) if len(ends) == len(self.places) else None

    def entry(self) -> dict[str, Any]:
        """What is over, and how, and which places have an execution now: for the controller."""
        record = self.record
        ends = [
            {
                "index": index,
                "execution": place.end.execution,
                "score": place.end.score,
                "valid": place.end.valid,
                "reason": place.end.reason,
            }
            for index, place in enumerate(self.places)
            if place.end is not None
        ]
        return {
            "group": record.group,
            "task": record.task,
            "size": record.size,
            "version": record.version,
            "burst": record.burst,
            "valid": self.valid,
            "ends": ends,
            "live": [index for index, place in enumerate(self.places) if place.live is not None],
        }

    def rows(self, live: Mapping[int, Live], now: float) -> Iterator[dict[str, Any]]:
        """Every execution of it that lives or has ended, for trainers; a lost one is replaced by its successor."""
        for index, place in enumerate(self.places):
            known = {"group": self.record.group, "index": index, "task": self.record.task}
            if place.live is not None:
                seconds = round(now - live[place.live].started, 3)
                yield {"execution": place.live, **known, "state": "live", "seconds": seconds}
            elif place.end is not None:
                end = place.end
                told = {"reason": end.reason, "score": end.score, "valid": end.valid, "calls": end.calls, "tokens": end.tokens}
                yield {"execution": end.execution, **known, "state": "ended", **told, "seconds": round(end.seconds, 3)}


def identity(record: Execution) -> dict[str, int]:
    """Which execution it is, wherever one is told of."""
    return {"execution": record.execution, "group": record.group, "index": record.index, "attempt": record.attempt}


def end_event(record: Execution, end: ExecutionEnd) -> dict[str, Any]:
    """Fields of `execution.end`."""
    return {
        **identity(record),
        "reason": end.reason,
        "score": end.score,
        "valid": end.valid,
        "tokens": end.tokens,
        "calls": end.calls,
        "seconds": round(end.seconds, 3),
        "detail": end.detail,
    }
