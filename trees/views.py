"""Mappings over a whole store that hold nothing: what lives in memory and what is sealed, read when it is asked for, ascending by id."""

from __future__ import annotations

import heapq
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Generic, TypeVar

from trees.ids import Ids

T = TypeVar("T")


class Both(Mapping[int, T], Generic[T]):
    """`live` values, and sealed ones by `find`; an id that is in both has its live value. `items` and `values` stream."""

    def __init__(self, live: Mapping[int, T], sealed: Ids, find: Callable[[int], T], stream: Callable[[], Iterator[tuple[int, T]]]) -> None:
        self._live = live
        self._sealed = sealed
        self._find = find
        self._stream = stream

    def __getitem__(self, key: int) -> T:
        return self._live[key] if key in self._live else self._find(key)

    def __contains__(self, key: object) -> bool:
        return key in self._live or key in self._sealed

    def __len__(self) -> int:
        return len(self._sealed) + sum(key not in self._sealed for key in self._live)

    def __iter__(self) -> Iterator[int]:
        last = None
        for key in heapq.merge(self._sealed, sorted(self._live)):
            if key != last:
                last = key
                yield key

    def items(self) -> ItemsView[int, T]:
        """(id, value), ascending."""
        return _Items(self, self._stream)

    def values(self) -> ValuesView[T]:
        """The values, ascending by id."""
        return _Values(self, self._stream)


class _Items(ItemsView[int, T]):
    def __init__(self, mapping: Mapping[int, T], stream: Callable[[], Iterator[tuple[int, T]]]) -> None:
        super().__init__(mapping)
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self._stream()


class _Values(ValuesView[T]):
    def __init__(self, mapping: Mapping[int, T], stream: Callable[[], Iterator[tuple[int, T]]]) -> None:
        super().__init__(mapping)
        self._stream = stream

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._stream())
