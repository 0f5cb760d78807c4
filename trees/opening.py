"""A writer's way into a directory: the journal that counts, cut where it was torn, and nothing beside what it lists.

Invariants: acknowledged data that are damaged are refused, never skipped (repair.py is for them); what is removed is what a crash left of a
write or a seal that did not finish: no journal lists it. The caller holds the directory's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trees.codec import Header
from trees.errors import Damaged
from trees.files import TEMPORARY, sync_directory
from trees.journal import JOURNAL, JournalWriter, journal_name, newest_journal
from trees.sealed import catalogued
from trees.segment import SEGMENT


@dataclass(frozen=True)
class Opened:
    """`payloads`: what the journal holds behind its header, to be read to the end before anything is appended."""

    journal: JournalWriter
    header: Header
    payloads: Iterator[bytes]


def open_newest(directory: Path, provenance: Mapping[str, Any]) -> Opened:
    """The newest journal, or the first one of a new store. Raises StoreError."""
    for path in directory.glob(f"{TEMPORARY}*"):
        path.unlink()
    newest = newest_journal(directory)
    if newest is None:
        return _begin(directory, provenance)
    journal, replay = JournalWriter.recover(directory / journal_name(newest))
    first = next(replay, None)
    if first is None:
        raise Damaged(f"{journal.path} has no header", "restore this file from a copy, or run gyre trees repair")
    header = catalogued(directory, Header.decode(first))
    if header.generation != newest:
        raise Damaged(f"{journal.path} is journal {header.generation}", "give the file its own name again")
    return Opened(journal, header, replay)


def _begin(directory: Path, provenance: Mapping[str, Any]) -> Opened:
    if holds_segments(directory):
        raise headless(directory)
    header = Header(1, provenance=provenance)
    return Opened(JournalWriter.create(directory / journal_name(1), [header.encode()]), header, iter(()))


def holds_segments(directory: Path) -> bool:
    """Whether there are sealed executions; without a journal nobody knows which of them count."""
    return any(SEGMENT.fullmatch(path.name) for path in directory.iterdir())


def headless(directory: Path) -> Damaged:
    """Segments whose journal is gone: no further try helps."""
    return Damaged(f"{directory} holds segments and no journal", "restore the newest journal-*.log from a copy, or run gyre trees repair")


def remove_debris(directory: Path, generation: int, segments: Collection[str]) -> None:
    """What a crash in the middle of a seal left: older journals, and segments that no journal lists."""
    for path in directory.iterdir():
        journal = JOURNAL.fullmatch(path.name)
        if (journal and int(journal[1]) < generation) or (SEGMENT.fullmatch(path.name) and path.name not in segments):
            path.unlink()
    sync_directory(directory)
