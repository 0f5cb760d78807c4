"""The sealed segments of a store, and the way to the one that holds something. For one thread at a time.

Memory is that of the catalogue (a few numbers a segment, and intervals of ids) and of the OPEN segments that were used last: it does not
grow with the number of sealed executions. The ranges of ids in the catalogue say which files can hold an id at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trees.catalogue import Entry
from trees.codec import RESTORE, Header
from trees.errors import Damaged
from trees.ids import Ids
from trees.records import Execution, ExecutionEnd, Group
from trees.sealed import Segment, row_of
from trees.segment import segment_name

T = TypeVar("T")
OPEN = 8
"""Segments whose file and tables stay in memory."""


class Shelf:
    """Segments in the catalogue's order. `executions` and `groups`: the ids of those in them."""

    def __init__(self, directory: Path, header: Header | None = None, before: Shelf | None = None) -> None:
        """Opens nothing. `before`: an earlier state, whose open segments are taken over where they still count."""
        old = dict(zip(before.entries, before.segments, strict=True)) if before else {}
        self.entries: tuple[Entry, ...] = header.segments if header else ()
        self.segments: list[Segment] = [old.get(entry) or Segment(directory / segment_name(entry.number), entry) for entry in self.entries]
        self.executions = header.executions if header else Ids()
        self.groups = header.groups if header else Ids()
        self._used: list[Segment] = [segment for segment in before._used if segment in self.segments] if before else []
        for segment in before.segments if before else ():
            if segment not in self._used:
                segment.forget()

    def home(self, execution: int) -> Segment:
        """The segment of an execution. KeyError: it is in none."""
        if execution not in self.executions:
            raise KeyError(execution)
        for segment in self._candidates(lambda entry: entry.executions, execution):
            if _has(segment.execution_ids, execution):
                return segment
        raise Damaged(f"execution {execution} is in none of the segments that count", RESTORE)

    def holder(self, node: int) -> Segment | None:
        """A segment that has the node, the newest one; None if none has."""
        return next((segment for segment in self._candidates(lambda entry: entry.nodes, node) if segment.holds(node)), None)

    def group(self, group: int) -> Group:
        """A group. KeyError: it is in none."""
        if group not in self.groups:
            raise KeyError(group)
        for segment in self._candidates(lambda entry: entry.groups, group):
            if _has(segment.group_ids, group):
                row = row_of(segment.group_ids, group)
                return segment.groups(slice(row, row + 1))[0]
        raise Damaged(f"group {group} is in none of the segments that count", RESTORE)

    def heads(self, after: int = -1) -> Iterator[tuple[Execution, ExecutionEnd]]:
        """All executions with an id above `after`, ascending, and how they ended; a few hundred are in memory at a time."""

        def stream(segment: Segment) -> Iterator[tuple[int, tuple[Execution, ExecutionEnd]]]:
            return ((head[0].execution, head) for head in segment.all_heads(after))

        return self._ascending(lambda entry: entry.executions, stream, after)

    def all_groups(self, after: int = -1) -> Iterator[Group]:
        """All groups with an id above `after`, ascending, each once."""

        def stream(segment: Segment) -> Iterator[tuple[int, Group]]:
            return ((group.group, group) for group in segment.all_groups(after))

        last = after
        for group in self._ascending(lambda entry: entry.groups, stream, after):
            if group.group > last:
                last = group.group
                yield group

    def rest(self) -> None:
        """Close all files and free all tables."""
        for segment in self.segments:
            segment.forget()
        self._used = []

    def _candidates(self, span: Callable[[Entry], tuple[int, int]], wanted: int) -> Iterator[Segment]:
        """Segments whose range has the id, newest content first."""
        for entry, segment in zip(reversed(self.entries), reversed(self.segments), strict=True):
            first, last = span(entry)
            if first <= wanted <= last:
                self._touch(segment)
                yield segment

    def _touch(self, segment: Segment) -> None:
        if segment in self._used:
            self._used.remove(segment)
        self._used.append(segment)
        while len(self._used) > OPEN:
            self._used.pop(0).forget()

    def _ascending(
        self, span: Callable[[Entry], tuple[int, int]], stream: Callable[[Segment], Iterator[tuple[int, T]]], after: int
    ) -> Iterator[T]:
        """What all segments list, by id; a segment is opened when its turn comes, and most have theirs alone."""
        pairs = zip(self.entries, self.segments, strict=True)
        waiting = [(span(entry)[0], n, segment) for n, (entry, segment) in enumerate(pairs) if span(entry)[1] > after]
        heapq.heapify(waiting)
        heap: list[tuple[int, int, T, Segment, Iterator[tuple[int, T]]]] = []

        def advance(number: int, segment: Segment, items: Iterator[tuple[int, T]]) -> None:
            item = next(items, None)
            if item is None:
                self._put_away(segment)
            else:
                heapq.heappush(heap, (item[0], number, item[1], segment, items))

        while waiting or heap:
            if waiting and (not heap or waiting[0][0] <= heap[0][0]):
                _, number, segment = heapq.heappop(waiting)
                advance(number, segment, stream(segment))
                continue
            _, number, value, segment, items = heapq.heappop(heap)
            yield value
            advance(number, segment, items)

    def _put_away(self, segment: Segment) -> None:
        if segment not in self._used:
            segment.forget()


def _has(ids: NDArray[np.int64], wanted: int) -> bool:
    row = int(np.searchsorted(ids, wanted))
    return row < len(ids) and int(ids[row]) == wanted
