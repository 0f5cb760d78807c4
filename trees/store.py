"""The store of one run: one writer, and any number of readers in other processes (reader.py).

Files of a directory: `journal-000007.log` (the append path), `segment-000001.h5`.. (sealed executions), `writer.lock`.
The newest journal is the truth: its header says how many segments count. A seal writes segments, then a new journal
that holds what lives on and counts them, and removes the old journal; the rename of the new journal is the one moment at which everything
moves, so a crash at any place loses and doubles nothing. A segment beyond the count is debris of a seal that did not finish.

Invariants: what `commit` returned for is on the disk; ids are dense and, once a record with them was committed, never used again;
a node never changes and its id stays good for ever (a sealed prefix that is used again is repeated in the journal under its id);
context under the same parent with the same tokens is one node, whichever execution brought it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trees.codec import Header, decode, encode, payloads
from trees.errors import Damaged, StoreError
from trees.files import LOCK, TEMPORARY, WriterLock, sync_directory
from trees.forest import Contents, Forest
from trees.journal import FRAME_LIMIT, JOURNAL, JournalWriter, journal_name, newest_journal
from trees.reader import StoreReader
from trees.records import Execution, Group, Intent, Node, NodeKind, Record, Role
from trees.rules import check, trimmed
from trees.sealed import Segment, counted_segments
from trees.segment import SEGMENT, Content, segment_name, write_segment

__all__ = ["StoreError", "StoreReader", "StoreWriter"]

SEGMENT_TOKENS = 1 << 25
"""Tokens after which a seal begins another segment (one execution is never cut)."""


class StoreWriter:
    """The one writer of a directory. Thread-safe: appends do not wait for a commit's fsync; commits of several threads share one."""

    def __init__(self, directory: Path, provenance: Mapping[str, Any] | None = None, *, take_over: bool = False) -> None:
        """Open or create, and recover. StoreError: another writer is alive, or acknowledged data are damaged.

        `provenance`: JSON-able facts that every new segment carries. `take_over`: also take the lock of a writer on another host, which
        only somebody who knows it dead may ask for.
        """
        self.directory = directory
        self._provenance = dict(provenance or {})
        self._state = threading.RLock()
        self._io = threading.RLock()
        self._seal = threading.RLock()
        self._pending: list[bytes] = []
        self._appended = self._committed = 0
        self._sealing: frozenset[int] = frozenset()
        self._abandoned: set[int] = set()
        self._known_groups: set[int] = set()
        self._sealed_groups: set[int] = set()
        self._segments: list[Segment] = []
        self._next_node = self._next_call = self._next_execution = 0
        self._generation = 0
        self._closed = False
        self._journal: JournalWriter
        self.forest = Forest()
        self._contents = Contents()
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(directory / LOCK, take_over=take_over)
        try:
            self._recover()
        except BaseException:
            self._lock.release()
            raise

    # -- ids ------------------------------------------------------------------------------------------------------------------
    def allocate_node(self) -> int:
        """The next node id."""
        with self._state:
            self._next_node += 1
            return self._next_node - 1

    def allocate_call(self) -> int:
        """The next call id."""
        with self._state:
            self._next_call += 1
            return self._next_call - 1

    def allocate_execution(self) -> int:
        """The next execution id."""
        with self._state:
            self._next_execution += 1
            return self._next_execution - 1

    # -- append ---------------------------------------------------------------------------------------------------------------
    def append(self, record: Record) -> None:
        """Buffer one record; it is durable after the next `commit`. ValueError for one that breaks an invariant (nothing happens then)."""
        with self._state:
            record = trimmed(record)
            if isinstance(record, Node):
                self._bring_back(record.parent)
            elif isinstance(record, Intent):
                self._bring_back(record.prompt)
            elif isinstance(record, Execution):
                self._bring_back_group(record.group)
            check(record, self.forest, self._contents, self._known_groups, self._sealing)
            self._take(record)

    def context_node(self, parent: int, tokens: NDArray[np.int32], execution: int, call: int, role: Role) -> int:
        """The CONTEXT node with these tokens (int32[n >= 1]) under `parent` (-1: a root): an existing one of any execution, or appended."""
        with self._state:
            tokens = np.array(tokens, np.int32)
            self._bring_back(parent)
            found = self._contents.context(parent, self._contents.hash_under(parent, NodeKind.CONTEXT, tokens))
            if found is not None and self._contents.owners[found] in (-1, execution):
                return found
            node = Node(self.allocate_node(), parent, execution, call, NodeKind.CONTEXT, role, tokens)
            self.append(node)
            return node.node

    def _take(self, record: Record) -> None:
        self._pending.append(encode(record))
        self._appended += 1
        self._apply(record)

    def _apply(self, record: Record) -> None:
        self.forest.apply(record)
        match record:
            case Node():
                if record.node not in self._contents.hashes:
                    self._contents.add(record)
                self._next_node = max(self._next_node, record.node + 1)
            case Intent():
                self._next_call = max(self._next_call, record.call + 1)
            case Execution():
                self._next_execution = max(self._next_execution, record.execution + 1)
            case Group():
                self._known_groups.add(record.group)

    def _bring_back(self, node: int) -> None:
        """Repeat a sealed node and its ancestors in the journal, so that the next segment is self-contained again."""
        if node < 0 or node in self.forest.nodes:
            return
        for segment in reversed(self._segments):
            if segment.holds(node):
                for old in segment.nodes(segment.rows_of([node])):
                    if old.node not in self.forest.nodes:
                        self._take(old)
                segment.forget()
                return
            segment.forget()

    def _bring_back_group(self, group: int) -> None:
        """Repeat a sealed group in the journal: a later execution of it needs it in its own segment."""
        if group not in self.forest.groups and group in self._known_groups:
            self._take(next(segment.groups[group] for segment in self._segments if group in segment.groups))

    # -- durability -----------------------------------------------------------------------------------------------------------
    def commit(self) -> None:
        """Everything appended before this call is on the disk when it returns.

        OSError (ENOSPC): the journal ends with a whole commit as before; what is not on the disk stays buffered, call again.
        StoreError: another writer took the directory.
        """
        with self._state:
            ticket = self._appended
        with self._io:
            while self._committed < ticket:
                self._lock.check()
                self._append_frame()

    def _append_frame(self) -> None:
        """The oldest pending records, about FRAME_LIMIT bytes of them, in one frame."""
        with self._state:
            size = count = 0
            while count < len(self._pending) and size < FRAME_LIMIT:
                size += len(self._pending[count])
                count += 1
            batch, self._pending = self._pending[:count], self._pending[count:]
        try:
            self._journal.append(b"".join(batch))
        except BaseException:
            with self._state:
                self._pending = batch + self._pending
            raise
        self._committed += count

    def seal(self) -> list[Path]:
        """Move executions that have ended into immutable segments and rotate the journal; returns the new segments.

        An ended execution with a call in flight stays until that call has ended. Safe in a thread while others append and commit: the
        segments are built aside. OSError (ENOSPC): the store is as before.
        """
        with self._seal:
            self.commit()
            with self._state:
                ready = [e for e in self.forest.ends if not self.forest.open_calls.get(e, set()) - self._abandoned]
                self._sealing = frozenset(ready)
                contents = [self._content(batch) for batch in self._batches(ready)]
            first = len(self._segments) + 1
            paths = [self.directory / segment_name(first + i) for i in range(len(contents))]
            try:
                for number, (path, content) in enumerate(zip(paths, contents, strict=True), first):
                    write_segment(path, number, content, self._provenance)
                if paths:
                    self._rotate(paths)
            except BaseException:
                if newest_journal(self.directory) == self._generation:
                    for path in paths:
                        path.unlink(missing_ok=True)
                raise
            finally:
                self._sealing = frozenset()
            return paths

    def _batches(self, executions: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 0
        for execution in executions:
            batch.append(execution)
            size += sum(len(self.forest.nodes[node].tokens) for node in self.forest.closure(execution))
            if size >= SEGMENT_TOKENS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _content(self, executions: list[int]) -> Content:
        """A forest of these executions alone, that later appends don't touch."""
        part = Forest()
        for record in self.forest.of_executions(executions):
            part.apply(record)
        part.groups = {e.group: self.forest.groups[e.group] for e in part.executions.values()}
        return Content(executions, part, {node: self._contents.hashes[node] for node in part.nodes})

    def _rotate(self, paths: list[Path]) -> None:
        """Make the segments count and the journal short, in one rename. Commits wait meanwhile, appends do not."""
        segments = [*self._segments, *(Segment(path) for path in paths)]
        with self._io:
            self._lock.check()
            with self._state:
                living = self._living()
                ids = (self._next_node, self._next_call, self._next_execution)
                held, self._pending = self._pending, []
            header = Header(self._generation + 1, len(segments), *ids, self._provenance)
            path = self.directory / journal_name(header.generation)
            try:
                fresh = JournalWriter.create(path, chain([header.encode()], payloads(living, FRAME_LIMIT)))
            except BaseException:
                with self._state:
                    self._pending = held + self._pending
                if path.exists():
                    self._journal.refuse()
                raise
            with self._state:
                self._adopt(living)
                old, self._journal = self._journal, fresh
                self._generation, self._segments = header.generation, segments
                self._sealed_groups.update(*(segment.groups for segment in segments[-len(paths) :]))
                self._committed = self._appended - len(self._pending)
            old.close()
            old.path.unlink(missing_ok=True)
            sync_directory(self.directory)

    def _adopt(self, living: list[Record]) -> None:
        """Hold in memory what the new journal holds, and what was appended while it was written; that stays pending."""
        forest = Forest()
        for record in living:
            forest.apply(record)
        late = [record for payload in self._pending for record in decode(payload)]
        repeated = self._leaned_on(late, forest)
        for record in [*repeated, *late]:
            forest.apply(record)
        if repeated:
            # In one piece with the first late record: tickets count pieces.
            self._pending[0] = b"".join(map(encode, repeated)) + self._pending[0]
        self.forest = forest
        self._contents = Contents.of(forest.nodes, self._contents.hashes)

    def _leaned_on(self, late: list[Record], forest: Forest) -> list[Record]:
        """What late records go on from and only the segments hold now."""
        new = {record.node for record in late if isinstance(record, Node)}
        starts = [r.parent if isinstance(r, Node) else r.prompt for r in late if isinstance(r, Node | Intent)]
        nodes = {node for start in starts for node in self.forest.ancestry(start)} - new - set(forest.nodes)
        known = {record.group for record in late if isinstance(record, Group)} | set(forest.groups)
        groups = {record.group for record in late if isinstance(record, Execution)} - known
        return [*(self.forest.groups[group] for group in sorted(groups)), *(self.forest.nodes[node] for node in sorted(nodes))]

    def _living(self) -> list[Record]:
        """What the next journal must repeat: executions that are not in a segment now, and groups that are in none."""
        live = [e for e in self.forest.executions if e not in self._sealing]
        needed = {self.forest.executions[e].group for e in live}
        sealing = {self.forest.executions[e].group for e in self._sealing}
        groups = [group for g, group in self.forest.groups.items() if g in needed or not (g in sealing or g in self._sealed_groups)]
        return [*groups, *self.forest.of_executions(live, boundaries=True)]

    def close(self) -> None:
        """Commit and give the directory back. Raises what `commit` raises; the directory is given back all the same."""
        with self._seal, self._io:
            if self._closed:
                return
            self._closed = True
            try:
                self.commit()
            finally:
                self._journal.close()
                self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- recovery -------------------------------------------------------------------------------------------------------------
    def _recover(self) -> None:
        for path in self.directory.glob(f"{TEMPORARY}*"):
            path.unlink()
        newest = newest_journal(self.directory)
        if newest is None:
            self._journal = self._create()
            return
        self._generation = newest
        self._journal, replay = JournalWriter.recover(self.directory / journal_name(newest))
        first = next(replay, None)
        if first is None:
            raise Damaged(f"{self._journal.path} has no header", "restore this file from a copy")
        header = Header.decode(first)
        self._segments = counted_segments(self.directory, header.segments)
        for segment in self._segments:
            self._sealed_groups.update(segment.groups)
        self._known_groups.update(self._sealed_groups)
        self._next_node, self._next_call, self._next_execution = header.next_node, header.next_call, header.next_execution
        for payload in replay:
            for record in decode(payload):
                self._apply(record)
        self._abandoned = {call for calls in self.forest.open_calls.values() for call in calls}
        self._remove_debris(newest, header.segments)

    def _create(self) -> JournalWriter:
        if any(SEGMENT.fullmatch(path.name) for path in self.directory.iterdir()):
            raise StoreError(f"{self.directory} holds segments and no journal", "restore the newest journal-*.log from a copy")
        self._generation = 1
        header = Header(1, provenance=self._provenance)
        return JournalWriter.create(self.directory / journal_name(1), [header.encode()])

    def _remove_debris(self, generation: int, segments: int) -> None:
        """What a crash in the middle of a seal left: older journals, or segments that no journal counts."""
        for path in self.directory.iterdir():
            journal, segment = JOURNAL.fullmatch(path.name), SEGMENT.fullmatch(path.name)
            if (journal and int(journal[1]) < generation) or (segment and int(segment[1]) > segments):
                path.unlink()
        sync_directory(self.directory)
