"""The store of one run: one writer, and any number of readers in other processes (reader.py).

Files of a directory: `journal-000007.log` (the append path), `segment-000001.h5`.. (sealed executions), `writer.lock`.
The newest journal is the truth: its header lists the segments that count. A seal writes segments, then a new journal
that holds what lives on and lists them, and removes the old journal; the rename of the new journal is the one moment at which everything
moves, so a crash at any place loses and doubles nothing. A segment that is not listed is debris of a seal that did not finish. A seal also
merges segments when there are many (binding.py; catalogue.py says which); the same rename puts the merged one in their place.

Invariants: what `commit` returned for is on the disk; ids are dense and, once a record with them was committed, never used again;
a node never changes and its id stays good for ever (a sealed prefix that is used again is repeated in the journal under its id);
context under the same parent with the same tokens is one node, whichever execution brought it. Memory is that of what lives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trees import sealing
from trees.binding import Binder
from trees.catalogue import Entry
from trees.codec import Header, decode, encode, payloads
from trees.errors import StoreError
from trees.files import LOCK, WriterLock, sync_directory
from trees.forest import Contents, Forest
from trees.ids import AnyOf
from trees.journal import FRAME_LIMIT, Draft, JournalWriter, journal_name, newest_journal
from trees.opening import open_newest, remove_debris
from trees.reader import StoreReader
from trees.records import Execution, Intent, Node, NodeKind, Record, Role
from trees.rules import check, trimmed
from trees.segment import sheet_of
from trees.shelf import Shelf

__all__ = ["StoreError", "StoreReader", "StoreWriter"]

log = logging.getLogger(__name__)
SEGMENT_TOKENS = 1 << 25
"""Tokens after which a seal begins another segment (one execution is never cut)."""

REMEMBERED = 1 << 12
"""Sealed nodes that are found again by what they say (system prompts, tools, tasks), so that they are not stored a second time."""


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
        self._late: list[Record] | None = None
        """What was appended since the next journal was begun; None: none is being written."""
        self._sealed_context: dict[tuple[int, bytes], int] = {}
        """Shared context that only segments have now, by parent and hash; the newest REMEMBERED."""
        self._abandoned: set[int] = set()
        self._next_node = self._next_call = self._next_execution = 0
        self._closed = False
        self._journal: JournalWriter
        self._header = Header(0)
        self._shelf = Shelf(directory)
        self.forest = Forest()
        self._contents = Contents()
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(directory / LOCK, take_over=take_over)
        try:
            self._recover()
            self._binder = Binder(directory, self._provenance, self._header.next_segment, self._lock.check)
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
                if record.execution in self._shelf.executions:
                    raise ValueError(f"execution {record.execution} exists and is sealed")
            check(record, self.forest, self._contents, AnyOf(self.forest.groups, self._shelf.groups), self._sealing)
            self._take(record)

    def context_node(self, parent: int, tokens: NDArray[np.int32], execution: int, call: int, role: Role) -> int:
        """The CONTEXT node with these tokens (int32[n >= 1]) under `parent` (-1: a root): an existing one of any execution, or appended."""
        with self._state:
            tokens = np.array(tokens, np.int32)
            self._bring_back(parent)
            digest = self._contents.hash_under(parent, NodeKind.CONTEXT, tokens)
            found = self._contents.context(parent, digest)
            if found is None and (parent, digest) in self._sealed_context:
                found = self._sealed_context[parent, digest]
                self._bring_back(found)
            if found is not None and self._contents.owners[found] in (-1, execution):
                return found
            node = Node(self.allocate_node(), parent, execution, call, NodeKind.CONTEXT, role, tokens)
            self.append(node)
            return node.node

    def _take(self, record: Record) -> None:
        self._pending.append(encode(record))
        self._appended += 1
        if self._late is not None:
            self._late.append(record)
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

    def _bring_back(self, node: int) -> None:
        """Repeat a sealed node and its ancestors in the journal, so that the next segment is self-contained again."""
        if node < 0 or node in self.forest.nodes:
            return
        segment = self._shelf.holder(node)
        if segment is not None:
            for old in segment.nodes(segment.rows_of([node])):
                if old.node not in self.forest.nodes:
                    self._take(old)
        self._shelf.rest()

    def _bring_back_group(self, group: int) -> None:
        """Repeat a sealed group in the journal: a later execution of it needs it in its own segment."""
        if group not in self.forest.groups and group in self._shelf.groups:
            self._take(self._shelf.group(group))
            self._shelf.rest()

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
        segments, merged ones too, are built aside. OSError (ENOSPC): the store is as before; a merge without room is put off.
        """
        with self._seal:
            self.commit()
            with self._state:
                ready = sealing.ready(self.forest, self._abandoned)
                self._sealing = frozenset(ready)
                forest = self.forest.snapshot()
            made: list[Entry] = []
            try:
                for part in sealing.contents(forest, self._contents.hashes, ready, SEGMENT_TOKENS):
                    self._binder.write(sheet_of(part), made)
                if made:
                    self._rotate(self._binder.merge([*self._shelf.entries, *made], made))
                    self._binder.remove([entry for entry in made if entry not in self._shelf.entries])
            except BaseException:
                # Only while the journal that does not list them is surely the newest, and ours; else the next opening removes what
                # does not count.
                with suppress(StoreError):
                    self._lock.check()
                    if newest_journal(self.directory) == self._header.generation:
                        self._binder.remove([entry for entry in made if entry not in self._shelf.entries])
                raise
            finally:
                self._sealing = frozenset()
            return [self._binder.path(entry) for entry in made if entry in self._shelf.entries]

    def _rotate(self, entries: list[Entry]) -> None:
        """Make these segments count and the journal short, in one rename.

        Appends and commits go on while the bulk is written; commits wait only while what came meanwhile is added.
        """
        with self._state:
            forest = self.forest.snapshot()
            self._late = []
            header = self._next_header(entries)
        try:
            living = sealing.living(forest, self._sealing, self._shelf.groups)
            draft = Draft(self.directory / journal_name(header.generation))
            draft.write(chain([header.encode()], payloads(living, FRAME_LIMIT)))
            successor = sealing.Successor(living, self._contents.hashes)
            leaving = {key: node for key, node in self._contents.shared() if node not in successor.forest.nodes}
            with self._io:
                self._switch(header, draft, successor)
            with self._state:
                self._remember(leaving)
        finally:
            with self._state:
                self._late = None

    def _remember(self, context: dict[tuple[int, bytes], int]) -> None:
        """Shared context that is in segments only from now on (or was used again meanwhile: then it does no harm)."""
        for key, node in context.items():
            self._sealed_context.pop(key, None)
            self._sealed_context[key] = node
        for key in list(self._sealed_context)[:-REMEMBERED]:
            del self._sealed_context[key]

    def _next_header(self, entries: list[Entry]) -> Header:
        gone = [self.forest.executions[e] for e in self._sealing]
        return replace(
            self._header,
            generation=self._header.generation + 1,
            segments=tuple(entries),
            next_segment=self._binder.number,
            next_node=self._next_node,
            next_call=self._next_call,
            next_execution=self._next_execution,
            executions=self._shelf.executions.union(self._sealing),
            groups=self._shelf.groups.union(e.group for e in gone),
            provenance=self._provenance or self._header.provenance,
        )

    def _switch(self, header: Header, draft: Draft, successor: sealing.Successor) -> None:
        """To the next journal: it gets what was appended since it was begun. No commit runs; appends do."""
        try:
            self._lock.check()
            with self._state:
                first = self._late or []
                more = [*successor.take(first, self.forest), *first]
                self._late = []
                held, self._pending = self._pending, []
            try:
                if more:
                    draft.write(payloads(more, FRAME_LIMIT))
                fresh = draft.finish()
            except BaseException:
                with self._state:
                    self._pending = held + self._pending
                raise
        except BaseException:
            # Before anything else can fail: a commit into a journal that no longer counts would be lost.
            if draft.may_count():
                self._journal.refuse()
            draft.drop()
            raise
        with self._state:
            repeated = successor.take(self._late or [], self.forest)
            if repeated:
                # In one piece with the first late record: tickets count pieces.
                self._pending[0] = b"".join(map(encode, repeated)) + self._pending[0]
            self.forest, self._contents = successor.forest, successor.contents
            old, self._journal = self._journal, fresh
            before, self._shelf = self._shelf, Shelf(self.directory, header, self._shelf)
            self._header = header
            self._committed = self._appended - len(self._pending)
        self._clear_away(old, [entry for entry in before.entries if entry not in header.segments])

    def _clear_away(self, old: JournalWriter, entries: Sequence[Entry]) -> None:
        """What counted before a switch. The switch is done, so this can't fail it: what stays is removed at the next opening."""
        try:
            old.close()
            old.path.unlink(missing_ok=True)
            self._binder.remove(entries)
            sync_directory(self.directory)
        except OSError as error:
            log.warning("what no longer counts stays in %s until it is opened again: %s", self.directory, error)

    def close(self) -> None:
        """Commit and give the directory back. Raises what `commit` raises; the directory is given back all the same."""
        with self._seal, self._io:
            if self._closed:
                return
            self._closed = True
            try:
                self.commit()
                self._journal.conclude()
            finally:
                self._journal.close()
                self._shelf.rest()
                self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- recovery -------------------------------------------------------------------------------------------------------------
    def _recover(self) -> None:
        opened = open_newest(self.directory, self._provenance)
        self._journal, self._header = opened.journal, opened.header
        header = opened.header
        self._shelf = Shelf(self.directory, header)
        for segment in self._shelf.segments:
            segment.open().close()
        self._next_node, self._next_call, self._next_execution = header.next_node, header.next_call, header.next_execution
        for payload in opened.payloads:
            for record in decode(payload):
                self._apply(record)
        self._abandoned = {call for calls in self.forest.open_calls.values() for call in calls}
        remove_debris(self.directory, header.generation, {segment.path.name for segment in self._shelf.segments})
