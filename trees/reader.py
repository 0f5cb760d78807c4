"""Reads a store while another process writes it.

A view is a journal (the newest) and the segments that its header counts, so it is consistent by itself. Reading an old journal to
its end after it was replaced is an earlier consistent view; the next `refresh` moves on. Nothing is missed and nothing doubled, because
journal and count change together, in one rename.

Invariant: `refresh` costs what is new since the last one, and at a rotation the new segments and the journal of what lives on.
"""

from __future__ import annotations

import errno
import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from trees.codec import Header, decode
from trees.errors import StoreError
from trees.forest import Forest
from trees.journal import Scan, journal_name, newest_journal
from trees.records import Execution, ExecutionEnd, Group
from trees.sealed import Segment, counted_segments
from trees.tree import Tree

_TRIES = 100
_CACHED = 4
"""Segments whose node tables stay in memory."""


def locate(path: Path) -> Path:
    """The store at `path`: a store's own directory, or a run's with the store in `trees`. StoreError if there is none."""
    for directory in (path, path / "trees"):
        if directory.is_dir() and newest_journal(directory) is not None:
            return directory
    raise StoreError(f"{path} holds no trajectory trees", "give a run directory, or its folder `trees`")


class StoreReader:
    """A view of one directory. Not thread-safe. A directory without a store is an empty view."""

    def __init__(self, directory: Path) -> None:
        """Opens nothing for writing and takes no lock. StoreError: counted data are missing or damaged."""
        self.directory = directory
        self.segments: list[Segment] = []
        self.header: Header | None = None
        self._scan: Scan | None = None
        self._forest = Forest()
        self._reread = (-1, -1)
        self._groups: dict[int, Group] = {}
        self._executions: dict[int, Execution] = {}
        self._ends: dict[int, ExecutionEnd] = {}
        """These three: what the segments hold."""
        self._sealed: dict[int, Segment] = {}
        self._cached: list[Segment] = []
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

    def groups(self) -> Mapping[int, Group]:
        """Every group by id, sealed ones first; a view as of the last `refresh`."""
        return MappingProxyType(ChainMap(self._forest.groups, self._groups))

    def executions(self) -> Mapping[int, Execution]:
        """Every execution by id, likewise."""
        return MappingProxyType(ChainMap(self._forest.executions, self._executions))

    def ends(self) -> Mapping[int, ExecutionEnd]:
        """The ends of executions that are over, by execution, likewise."""
        return MappingProxyType(ChainMap(self._forest.ends, self._ends))

    def incomplete(self, execution: int) -> bool:
        """A call of it has an intent and no end. KeyError: unknown execution."""
        if execution in self._sealed:
            return execution in self._sealed[execution].open_calls
        return bool(self._forest.executions[execution] and self._forest.open_calls.get(execution))

    def tree(self, execution: int, *, tokens: bool = True) -> Tree:
        """The tree of one execution, live or ended. KeyError: unknown. `tokens` False: a skeleton with lengths only."""
        segment = self._sealed.get(execution)
        if segment is None:
            return self._forest.tree(execution)
        self._touch(segment)
        return segment.tree(execution, tokens=tokens)

    @property
    def live(self) -> Forest:
        """The records that are in the journal, not in a segment."""
        return self._forest

    def close(self) -> None:
        """Close the journal; the view stays as it is."""
        if self._scan is not None:
            os.close(self._scan.fd)
            self._scan = self.header = None

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _switch(self, generation: int) -> None:
        """To a journal that was not read before, and the segments that it counts."""
        fd = os.open(self.directory / journal_name(generation), os.O_RDONLY | os.O_CLOEXEC)
        try:
            scan, header, forest = _replay(fd)
            segments = counted_segments(self.directory, header.segments, self.segments)
        except BaseException:
            os.close(fd)
            raise
        self.close()
        for segment in segments[len(self.segments) :]:
            self._groups.update(segment.groups)
            self._executions.update(segment.executions)
            self._ends.update(segment.ends)
            self._sealed.update(dict.fromkeys(segment.executions, segment))
        self.header, self.segments, self._scan, self._forest = header, segments, scan, forest

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

    def _touch(self, segment: Segment) -> None:
        if segment in self._cached:
            self._cached.remove(segment)
        self._cached.append(segment)
        while len(self._cached) > _CACHED:
            self._cached.pop(0).forget()


def _replay(fd: int) -> tuple[Scan, Header, Forest]:
    scan, forest = Scan(fd), Forest()
    frames = scan.frames()
    first = next(frames, None)
    if first is None:
        raise StoreError("the journal has no header", "restore it from a copy")
    header = Header.decode(first)
    for payload in frames:
        for record in decode(payload):
            forest.apply(record)
    return scan, header, forest
