"""Sets of ids that are dense but for a few gaps, as sorted disjoint intervals: a million sealed executions cost a handful of numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator

import numpy as np


class Ids(Container[int]):
    """A set of integers as intervals. Membership and `add` are O(log intervals)."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        """`spans`: (first, last) each, ascending and disjoint, as `spans` gives them."""
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in spans:
            if last < first or (self._last and first <= self._last[-1]):
                raise ValueError(f"intervals of ids that do not ascend: ({first}, {last})")
            self._first.append(first)
            self._last.append(last)

    @staticmethod
    def of(values: Iterable[int]) -> Ids:
        """The set of these values."""
        ids = Ids()
        for value in sorted(values):
            ids.add(value)
        return ids

    def add(self, value: int) -> None:
        """Take one in; its neighbours grow together with it."""
        value = int(value)
        at = bisect_right(self._first, value)
        if at and value <= self._last[at - 1]:
            return
        below = bool(at) and self._last[at - 1] == value - 1
        above = at < len(self._first) and self._first[at] == value + 1
        if below and above:
            self._last[at - 1] = self._last.pop(at)
            del self._first[at]
        elif below:
            self._last[at - 1] = value
        elif above:
            self._first[at] = value
        else:
            self._first.insert(at, value)
            self._last.insert(at, value)

    def union(self, values: Iterable[int]) -> Ids:
        """A new set with these values too."""
        ids = Ids(self.spans)
        for value in values:
            ids.add(value)
        return ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, last) of each interval, ascending."""
        return list(zip(self._first, self._last, strict=True))

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | np.integer):
            return False
        at = bisect_right(self._first, value)
        return bool(at and value <= self._last[at - 1])

    def __iter__(self) -> Iterator[int]:
        for first, last in self.spans:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ids) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(tuple(self.spans))


class AnyOf(Container[int]):
    """The union of sets, as they are at the moment of the question."""

    def __init__(self, *sets: Container[int]) -> None:
        self._sets = sets

    def __contains__(self, value: object) -> bool:
        return any(value in known for known in self._sets)
