"""Makes a damaged store usable again and says what is lost: behind `gyre trees repair`.

Invariants: no damaged file is deleted, it goes to `damaged/` in the store's directory (a second name for its bytes first, so that a crash
at any place loses nothing); what can be read with all of its checksums stays, under its ids; nothing is made up. The next journal
makes all of it count at once, as in a seal. Of a damaged segment each execution is kept whole, or by its head alone (how it ended; its tree
is empty, so nothing of it is trained on), or it is lost: ids that are lost are listed in the journal's header and never used again.
A journal with a hole keeps the records that do not lean on what was in it. One writer's lock is held all the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from trees.catalogue import Entry
from trees.codec import Header, decode, payloads
from trees.errors import Damaged, StoreError
from trees.files import LOCK, WriterLock, sync_directory, write_durably
from trees.ids import AnyOf, Ids
from trees.journal import FRAME_LIMIT, JOURNAL, JournalWriter, frame, journal_name, newest_journal
from trees.merging import digest_of_file
from trees.records import Execution, Group, Intent, Node, Record
from trees.salvage import consistent, good_frames, rescued
from trees.sealed import Segment, catalogued, entry_of
from trees.segment import SEGMENT, segment_name, sheet_of, write_segment
from trees.store import StoreWriter
from trees.verify import segment_problems

T = TypeVar("T")
EMPTY = frame(0, b"")
DAMAGED = "damaged"
"""Where files go that can't be believed, below the store's directory."""
_PIECE = 1 << 20


@dataclass
class Repair:
    """What was done, one line each; executions that are gone, and those of which only the end is left."""

    done: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)


@dataclass
class _Rest:
    """What is left of a store while it is put together again."""

    header: Header
    records: list[Record]
    entries: list[Entry] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    journal: str = ""
    tail: bool = False
    """The journal ends with what is no commit."""
    holes: bool = False
    """The journal lacks something."""
    listed: bool = False
    """The header was there, so it is known which segments count."""
    changed: bool = False


def repair(path: Path) -> Repair:
    """Repair the store at `path` (a store or a run directory).

    StoreError: there is none, a writer has it, or another version wrote it. OSError (ENOSPC): it is as before.
    """
    directory = _locate(path)
    report = Repair()
    lock = WriterLock(directory / LOCK)
    try:
        before = {file.name for file in directory.iterdir()}
        rest = _read_journal(directory, report)
        _sort_out(directory, rest, report)
        if rest.changed:
            _write(directory, rest)
    finally:
        lock.release()
    StoreWriter(directory).close()
    if rest.tail and not rest.changed:
        report.done.append("an uncommitted tail of the journal was cut")
    kept = {file.name for file in [*directory.iterdir(), *rest.aside]} | {LOCK, rest.journal}
    report.done += [f"{name} was left by a crash and is removed" for name in sorted(before - kept)]
    return report


def _locate(path: Path) -> Path:
    """As reader.locate, but segments without a journal are enough."""
    for directory in (path, path / "trees"):
        if directory.is_dir() and any(JOURNAL.fullmatch(name) or SEGMENT.fullmatch(name) for name in os.listdir(directory)):
            return directory
    raise StoreError(f"{path} holds no trajectory trees", "give a run directory, or its folder `trees`")


# -- the journal -----------------------------------------------------------------------------------------------------------------
def _read_journal(directory: Path, report: Repair) -> _Rest:
    newest = newest_journal(directory)
    if newest is None:
        report.done.append("there is no journal: a new one lists the segments")
        return _Rest(Header(0), [], holes=True, changed=True)
    path = directory / journal_name(newest)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        frames, holes = good_frames(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    header, records = None, list[Record]()
    for seq, payload in frames:
        try:
            if seq == 0:
                header = catalogued(directory, Header.decode(payload))
            else:
                records += decode(payload)
        except Damaged as error:  # any other StoreError: another version wrote this, and knows what it means
            holes.append(error.what)
    if header is None:
        holes.append("it has no header, so the segments that are there are taken")
    for hole in holes:
        report.done.append(f"{path.name}: {hole}; set aside in {DAMAGED}/")
    found = _Rest(header or Header(newest), records, holes=bool(holes), changed=bool(holes), aside=[path] if holes else [])
    found.tail = size > sum(len(EMPTY) + len(payload) for _, payload in frames)
    found.listed, found.journal = header is not None, path.name
    return found


# -- segments --------------------------------------------------------------------------------------------------------------------
def _sort_out(directory: Path, rest: _Rest, report: Repair) -> None:
    """Keep what is good, rescue what can be, and name what is lost."""
    listed = list(rest.header.segments) if rest.listed else _found(directory, rest, report)
    bad: list[tuple[Segment, str]] = []
    taken = Ids()
    for entry in listed:
        segment = Segment(directory / segment_name(entry.number), entry)
        problem = _problem(segment, entry)
        if problem:
            bad.append((segment, problem))
        else:
            rest.entries.append(entry)
            taken = taken.union(segment.execution_ids.tolist())
        segment.forget()
    for segment, problem in bad:
        rest.changed = True
        if segment.path.exists():
            rest.aside.append(segment.path)
        report.done.append(f"{segment.path.name}: {problem}; set aside in {DAMAGED}/")
        taken = taken.union(_rescue(directory, segment, taken, rest, report))
    if rest.changed:
        _settle(directory, rest, taken, report)


def _found(directory: Path, rest: _Rest, report: Repair) -> list[Entry]:
    """Segments that are there, when nothing says which count: those of the most executions first, none of which is there twice."""
    found: list[tuple[int, Entry, list[int]]] = []
    for path in sorted(directory.iterdir()):
        match = SEGMENT.fullmatch(path.name)
        if not match:
            continue
        segment = Segment(path)
        try:
            entry = replace(entry_of(segment, int(match[1])), digest=digest_of_file(path))
            found.append((len(segment.execution_ids), entry, segment.execution_ids.tolist()))
        except StoreError as error:
            rest.aside.append(path)
            report.done.append(f"{path.name}: {error.what}; set aside in {DAMAGED}/")
        finally:
            segment.forget()
    taken, chosen = Ids(), list[Entry]()
    for _, entry, executions in sorted(found, key=lambda item: (-item[0], item[1].number)):
        if any(execution in taken for execution in executions):
            rest.aside.append(directory / segment_name(entry.number))
            report.done.append(f"{segment_name(entry.number)} holds what others hold; set aside in {DAMAGED}/")
            continue
        taken = taken.union(executions)
        chosen.append(entry)
    return sorted(chosen, key=lambda entry: entry.executions)


def _problem(segment: Segment, entry: Entry) -> str:
    """What is wrong with a segment, the first thing; empty if nothing is."""
    try:
        return next(iter(segment_problems(segment, entry)), "")
    except StoreError as error:
        return error.what


def _rescue(directory: Path, segment: Segment, taken: Ids, rest: _Rest, report: Repair) -> list[int]:
    """A new segment of what can be read of a damaged one; the executions in it."""
    reader = Segment(segment.path)  # without an entry: also a file that is too short is read as far as it goes
    try:
        found = rescued(reader, taken, [record for record in rest.records if isinstance(record, Group)])
    finally:
        reader.forget()
    kept = found.content.executions
    if kept:
        number = max([rest.header.next_segment, *(_number(name) + 1 for name in os.listdir(directory))])
        rest.entries.append(write_segment(directory, number, sheet_of(found.content), rest.header.provenance))
        report.heads += found.heads
        report.done.append(f"{segment_name(number)}: {len(kept)} executions of it, {len(found.heads)} of them without their trees")
    return kept


def _number(name: str) -> int:
    match = SEGMENT.fullmatch(name)
    return int(match[1]) if match else 0


# -- together again --------------------------------------------------------------------------------------------------------------
def _settle(directory: Path, rest: _Rest, taken: Ids, report: Repair) -> None:
    """Groups and free ids of the new header; of a journal with holes the records that stand by themselves; what is lost, by name."""
    header, groups, nodes, calls = rest.header, list[Group](), [rest.header.next_node], [rest.header.next_call]
    for entry in rest.entries:
        segment = Segment(directory / segment_name(entry.number), entry)
        groups += segment.all_groups()
        nodes.append(entry.nodes[1] + 1)
        if segment.rows("calls"):
            calls.append(int(segment.column("calls/id", slice(-1, None))[0]) + 1)
        segment.forget()
    if rest.holes:
        rest.records, hurt = consistent(rest.records, taken, groups)
    else:
        hurt = set[int]()
    live = {record.execution for record in rest.records if isinstance(record, Execution)}
    nodes += [record.node + 1 for record in rest.records if isinstance(record, Node)]
    calls += [record.call + 1 for record in rest.records if isinstance(record, Intent)]
    free = max([header.next_execution, *(last + 1 for _, last in taken.spans[-1:]), *(execution + 1 for execution in live)])
    known = AnyOf(taken, live, header.lost)
    expected = range(free) if rest.holes else header.executions
    report.lost = [execution for execution in expected if execution not in known]
    report.done += [f"execution {execution} is lost" for execution in report.lost]
    report.done += [f"execution {execution}: its tree is lost, how it ended is kept" for execution in sorted(report.heads)]
    report.done += [f"execution {execution}: records that lean on what is lost were dropped" for execution in sorted(hurt & live)]
    rest.header = replace(
        header,
        segments=tuple(sorted(rest.entries, key=lambda entry: entry.executions)),
        next_segment=max([header.next_segment, *(entry.number + 1 for entry in rest.entries)]),
        next_node=max(nodes),
        next_call=max(calls),
        next_execution=free,
        executions=taken,
        groups=Ids.of({group.group for group in groups}),
        lost=header.lost.union(report.lost),
    )


def _write(directory: Path, rest: _Rest) -> None:
    """A second name for what is set aside, the next journal, and only then the first names away."""
    if rest.aside:
        (directory / DAMAGED).mkdir(exist_ok=True)
        for path in rest.aside:
            _keep(path, directory / DAMAGED)
        sync_directory(directory / DAMAGED)
    header = replace(rest.header, generation=max(rest.header.generation, newest_journal(directory) or 0) + 1)
    path = directory / journal_name(header.generation)
    JournalWriter.create(path, chain([header.encode()], payloads(rest.records, FRAME_LIMIT))).close()
    for path in rest.aside:
        path.unlink()
    sync_directory(directory)


def _keep(path: Path, folder: Path) -> None:
    for number in count():
        target = folder / (f"{path.name}.{number}" if number else path.name)
        try:
            os.link(path, target)
        except FileExistsError:
            if target.samefile(path):  # a repair before this one did not get further
                return
            continue
        except OSError:  # a file system without hard links
            write_durably(target, _pieces(path))
        return


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
