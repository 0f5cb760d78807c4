"""Segment files of one writer: written, merged when there are many, and removed. Which of them count is the journal's business (store.py).

Invariants: a number is given once; nothing here makes a file count or stop counting, so whatever fails leaves debris at most; a damaged
segment is set aside and merged with nothing, because what is wrong must not spread. For one thread at a time (the seal's).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trees.catalogue import Entry, to_merge
from trees.errors import Damaged
from trees.merging import check_digest, merged
from trees.sealed import Segment
from trees.segment import Sheet, segment_name, write_segment

log = logging.getLogger(__name__)


class Binder:
    """`provenance`: what each segment carries; `number`: the first to give; `still_ours` raises once another writer has the directory."""

    def __init__(self, directory: Path, provenance: Mapping[str, Any], number: int, still_ours: Callable[[], None]) -> None:
        self._directory, self._provenance, self._still_ours = directory, provenance, still_ours
        self.number = number
        """Of the next segment."""
        self._set_aside: set[int] = set()

    def write(self, sheet: Sheet, made: list[Entry]) -> Entry:
        """One segment, which is also added to `made`. OSError: there is none."""
        number, self.number = self.number, self.number + 1
        entry = write_segment(self._directory, number, sheet, self._provenance, self._still_ours)
        made.append(entry)
        return entry

    def remove(self, entries: Sequence[Entry]) -> None:
        """Their files, where they are there."""
        for entry in entries:
            self.path(entry).unlink(missing_ok=True)

    def path(self, entry: Entry) -> Path:
        """Where a segment lies."""
        return self._directory / segment_name(entry.number)

    def merge(self, entries: list[Entry], made: list[Entry]) -> list[Entry]:
        """The catalogue with one segment in place of several, if it is time. What can't be merged stays as it is."""
        chosen = to_merge([entry for entry in entries if entry.number not in self._set_aside])
        if not chosen:
            return entries
        # Objects of its own: appends of other threads read from the shelf's.
        paths = [self.path(entry) for entry in chosen]
        segments = [Segment(path, entry) for path, entry in zip(paths, chosen, strict=True)]
        at = entries.index(chosen[-1])
        try:
            # All of them, so that each damaged one is told of once.
            if not all([self._is_sound(path, entry) for path, entry in zip(paths, chosen, strict=True)]):  # noqa: C419
                return self.merge(entries, made)
            new = self.write(merged(segments), made)
        except OSError as error:
            log.warning("segments of %s are not merged now: %s", self._directory, error)
            return entries
        except Damaged as error:
            log.warning("%s; nothing is merged with it", error)
            self._set_aside.update(entry.number for entry in chosen)
            return entries
        finally:
            for segment in segments:
                segment.forget()
        return [entry for entry in [*entries[: at + 1], new, *entries[at + 1 :]] if entry not in chosen]

    def _is_sound(self, path: Path, entry: Entry) -> bool:
        try:
            check_digest(path, entry)
        except Damaged as error:
            log.warning("%s; nothing is merged with it", error)
            self._set_aside.add(entry.number)
            return False
        return True
