"""Reads a store while another process writes it.

A view is a journal (the newest) and the segments that its header lists, so it is consistent by itself. Reading an old journal to
its end after it was replaced is an earlier consistent view; the next `refresh` moves on. Nothing is missed and nothing doubled, because
journal and list change together, in one rename.

Invariants: `refresh` costs what is new since the last one, and at a rotation the journal of what lives on; opening a store costs its
journal; memory is that of the journal and of a few segments, however many executions are sealed. A view that needs a segment that was
merged away moves on by itself: executions that are over never change, and none is ever gone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from trees.codec import Header, decode
from trees.errors import Damaged, Missing, StoreError
from trees.forest import Forest
from trees.ids import Ids
from trees.journal import Scan, damage_after, journal_name, newest_journal
from trees.opening import headless, holds_segments
from trees.records import Execution, ExecutionEnd, Group
from trees.sealed import Segment, catalogued
from trees.shelf import Shelf
from trees.tree import Tree
from trees.views import Both

T = TypeVar("T")
_TRIES = 100


def locate(path: Path) -> Path:
    """The store at `path`: its own directory, or a run's with the store in `trees`. StoreError if there is none, or no journal of it."""
    for directory in (path, path / "trees"):
        if directory.is_dir() and newest_journal(directory) is not None:
            return directory
    for directory in (path, path / "trees"):
        if directory.is_dir() and holds_segments(directory):
            raise headless(directory)
    raise StoreError(f"{path} holds no trajectory trees", "give a run directory, or its folder `trees`")


class StoreReader:
    """A view of one directory. Not thread-safe. A directory without a store is an empty view."""

    def __init__(self, directory: Path) -> None:
        """Opens nothing for writing and takes no lock. StoreError: counted data are missing or damaged."""
        self.directory = directory
        self.header: Header | None = None
        self._shelf = Shelf(directory)
        self._scan: Scan | None = None
        self._forest = Forest()
        self._reread = (-1, -1)
        self.refresh()

    def refresh(self) -> None:
        """See what has been committed since."""
        for _ in range(_TRIES):
            try:
                newest = newest_journal(self.directory) if self.directory.exists() else None
                if newest is None:
                    return
                if self.header is None or newest != self.header.generation:
                    self._switch(newest)
                else:
                    self._follow()
                return
            except OSError as error:
                # The journal was replaced between the look and the open (ESTALE: on another node of a network file system).
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
        raise StoreError(f"{self.directory}: the journal was replaced {_TRIES} times while it was opened", "try again")

    def check(self) -> None:
        """Damaged: commits stand in the journal behind bytes that can't be read, so this view lacks them. Works while it is written."""
        for _ in range(_TRIES):
            scan = self._scan
            later = None if scan is None else damage_after(scan.fd, scan.offset, scan.seq)
            if scan is None or later is None or self.header is None:
                return
            seen = (self.header.generation, scan.offset)
            self.refresh()  # whoever writes had finished what was half there before it wrote what stands behind
            if self._scan is not None and (self.header.generation, self._scan.offset) == seen:
                path = self.directory / journal_name(seen[0])
                raise Damaged(
                    f"{path} is damaged at byte {seen[1]}: a good frame follows at byte {later}", "gyre trees repair keeps what can be read"
                )

    # -- what there is --------------------------------------------------------------------------------------------------------
    @property
    def segments(self) -> list[Segment]:
        """The segments of the view, oldest content first."""
        return self._shelf.segments

    @property
    def lost(self) -> Ids:
        """Executions that a repair had to give up."""
        return self.header.lost if self.header else Ids()

    def groups(self) -> Mapping[int, Group]:
        """Every group by id, ascending; read when asked for, as of the last `refresh`."""
        return Both(self._forest.groups, self._shelf.groups, self._group, lambda: ((g.group, g) for g in self.all_groups()))

    def executions(self) -> Mapping[int, Execution]:
        """Every execution by id, likewise. One after the other: `heads`."""
        return Both(
            self._forest.executions,
            self._shelf.executions,
            lambda e: self._head(e)[0],
            lambda: ((begun.execution, begun) for begun, _ in self.heads()),
        )

    def ends(self) -> Mapping[int, ExecutionEnd]:
        """The ends of executions that are over, by execution, likewise."""
        return Both(
            self._forest.ends,
            self._shelf.executions,
            lambda e: self._head(e)[1],
            lambda: ((end.execution, end) for _, end in self.heads() if end is not None),
        )

    def heads(self) -> Iterator[tuple[Execution, ExecutionEnd | None]]:
        """Every execution, ascending, with its end if it is over; a few hundred are in memory at a time."""
        live = sorted(set(self._forest.executions))
        for begun, end in self._streamed(lambda after: self._shelf.heads(after), lambda head: head[0].execution):
            while live and live[0] < begun.execution:
                yield from self._live_head(live.pop(0))
            if live and live[0] == begun.execution:  # sealed while we were listing
                live.pop(0)
            yield begun, end
        for execution in live:
            yield from self._live_head(execution)

    def all_groups(self) -> Iterator[Group]:
        """Every group, ascending, likewise."""
        live = dict(self._forest.groups)
        for group in self._streamed(lambda after: self._shelf.all_groups(after), lambda group: group.group):
            for number in sorted(number for number in live if number <= group.group):
                record = live.pop(number)
                if number < group.group:
                    yield record
            yield group
        yield from (live[number] for number in sorted(live))

    def incomplete(self, execution: int) -> bool:
        """A call of it has an intent and no end. KeyError: unknown execution."""
        if execution in self._forest.executions:
            return bool(self._forest.open_calls.get(execution))
        return self._asked(lambda: execution in self._shelf.home(execution).open_calls)

    def tree(self, execution: int, *, tokens: bool = True) -> Tree:
        """The tree of one execution, live or ended. KeyError: unknown. `tokens` False: a skeleton with lengths only."""
        if execution in self._forest.executions:
            return self._forest.tree(execution)
        return self._asked(lambda: self._shelf.home(execution).tree(execution, tokens=tokens))

    @property
    def live(self) -> Forest:
        """The records that are in the journal, not in a segment."""
        return self._forest

    def close(self) -> None:
        """Close all files; the view stays as it is."""
        self._shelf.rest()
        if self._scan is not None:
            os.close(self._scan.fd)
            self._scan = self.header = None

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- segments that are merged away ----------------------------------------------------------------------------------------
    def _asked(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except Missing:
                if not self._moved_on():
                    raise

    def _streamed(self, stream: Callable[[int], Iterator[T]], key: Callable[[T], int]) -> Iterator[T]:
        last = -1
        while True:
            try:
                for item in stream(last):
                    last = key(item)
                    yield item
                return
            except Missing:
                if not self._moved_on():
                    raise

    def _moved_on(self) -> bool:
        """To the present view. False: it is the one that we had, so the segment is really missing."""
        generation = self.header.generation if self.header else -1
        self.refresh()
        return self.header is not None and self.header.generation != generation

    def _head(self, execution: int) -> tuple[Execution, ExecutionEnd]:
        return self._asked(lambda: self._shelf.home(execution).head(execution))

    def _group(self, group: int) -> Group:
        return self._asked(lambda: self._shelf.group(group))

    def _live_head(self, execution: int) -> Iterator[tuple[Execution, ExecutionEnd | None]]:
        if execution in self._forest.executions:
            yield self._forest.executions[execution], self._forest.ends.get(execution)
        elif execution in self._shelf.executions:
            yield self._head(execution)

    # -- the journal ----------------------------------------------------------------------------------------------------------
    def _switch(self, generation: int) -> None:
        """To a journal that was not read before, and the segments that it lists."""
        fd = os.open(self.directory / journal_name(generation), os.O_RDONLY | os.O_CLOEXEC)
        try:
            scan, header, forest = _replay(fd)
            header = catalogued(self.directory, header)
            shelf = Shelf(self.directory, header, self._shelf)
        except BaseException:
            os.close(fd)
            raise
        if self._scan is not None:
            os.close(self._scan.fd)
        self.header, self._shelf, self._scan, self._forest = header, shelf, scan, forest

    def _follow(self) -> None:
        """To the present end of the journal."""
        scan = self._scan
        if scan is None:
            return
        size = os.fstat(scan.fd).st_size
        for payload in scan.frames():
            for record in decode(payload):
                self._forest.apply(record)
        # A commit that failed is taken back and another one comes in its place: what was seen of it must be seen anew.
        if (scan.bad or size < scan.offset) and self._reread != (scan.offset, size):
            self._scan, _, self._forest = _replay(scan.fd)
            self._reread = (self._scan.offset, size)


def _replay(fd: int) -> tuple[Scan, Header, Forest]:
    scan, forest = Scan(fd), Forest()
    frames = scan.frames()
    first = next(frames, None)
    if first is None:
        raise Damaged("the journal has no header", "restore it from a copy, or run gyre trees repair")
    header = Header.decode(first)
    for payload in frames:
        for record in decode(payload):
            forest.apply(record)
    return scan, header, forest
