"""The append path: one file of checksummed frames, each one a group commit.

Frame: magic "GYJ1", payload length u32, sequence number u64, CRC-32 u32 (of length, sequence and payload), payload; little-endian.
Ordering key: the sequence number, dense from 0. Frame 0 is the header that the owner gave at creation.

Invariants: a frame is written only after the one before it is on the disk, so only the last frame can be torn; recovery cuts a
torn tail, and refuses a bad frame that a good one follows (that is damage to acknowledged data, not a torn tail). A failed append
(ENOSPC, EDQUOT, EIO) leaves the file as it was before; if even that fails the journal refuses to go on until it is reopened.

While a writer holds it the file ends with zeros, room that was written ahead: a small commit then overwrites blocks that are there,
and its fdatasync needs no metadata of the file system (measured: 0.1 ms in place of 4). Zeros where a frame would begin are the end of
the journal. Closing and recovery cut them. After a failed append nothing is written ahead any more, so that a reader sees from the
file's size alone that a frame was taken back.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trees.errors import Damaged, StoreError
from trees.files import LOCK, TEMPORARY, sync_directory, write_all

_HEAD = struct.Struct("<4sIQI")
_MAGIC = b"GYJ1"
_SCAN = 1 << 20
_LOOKS = 50
JOURNAL = re.compile(r"journal-(\d{6,})\.log")
AHEAD = 1 << 20
"""Bytes of zeros that are written ahead of the frames."""
_SMALL = AHEAD // 8
"""Frames up to this size are worth it; larger ones would write every byte twice."""
FRAME_LIMIT = 4 << 20
"""Bytes of payload from which on a new frame begins (a single larger record still has one frame of its own): nothing else of the process
runs while they are joined, so not many."""


def journal_name(generation: int) -> str:
    """The file name of a journal."""
    return f"journal-{generation:06d}.log"


def newest_journal(directory: Path) -> int | None:
    """The generation of the journal that counts; None if there is none.

    A listing that runs while a journal is replaced may show neither (the old one removed before, the new one added behind the
    place where it reads). While a writer holds the directory, "none" is therefore believed after many looks only.
    """
    for _ in range(_LOOKS):
        names = os.listdir(directory)
        found = [int(match[1]) for name in names if (match := JOURNAL.fullmatch(name))]
        if found:
            return max(found)
        if LOCK not in names:
            return None
    return None


def frame(seq: int, payload: bytes) -> bytes:
    """One frame, ready to be written."""
    if len(payload) >= 1 << 32:
        raise ValueError(f"a commit of {len(payload)} bytes: at most 4 GiB - 1")
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<IQ", len(payload), seq)))
    return _HEAD.pack(_MAGIC, len(payload), seq, crc) + payload


class Scan:
    """Reads whole frames from `offset` on, as far as there are any; can be called again when the file has grown."""

    def __init__(self, fd: int, offset: int = 0, seq: int = 0) -> None:
        self.fd = fd
        self.offset = offset
        self.seq = seq
        self.bad = False
        """The bytes at `offset` are not the beginning of a frame (a torn tail, damage, or a frame that was taken back). A frame whose
        rest is wrong is not `bad`: it may be written at this moment."""

    def frames(self) -> Iterator[bytes]:
        """Payloads of the next whole frames."""
        self.bad = False
        while True:
            head = os.pread(self.fd, _HEAD.size, self.offset)
            if len(head) < _HEAD.size:
                self.bad = any(head) and not _MAGIC.startswith(head[:4])
                return
            magic, length, seq, crc = _HEAD.unpack(head)
            if magic != _MAGIC or seq != self.seq:
                self.bad = any(head)
                return
            payload = _read(self.fd, length, self.offset + _HEAD.size)
            if len(payload) < length or zlib.crc32(payload, zlib.crc32(head[4:16])) != crc:
                return
            self.offset += _HEAD.size + length
            self.seq += 1
            yield payload


def _read(fd: int, length: int, offset: int) -> bytes:
    """`length` bytes, or fewer at the end of the file. Never allocates for a length that the file does not hold."""
    length = min(length, max(0, os.fstat(fd).st_size - offset))
    parts = []
    while length and (part := os.pread(fd, length, offset)):
        parts.append(part)
        length, offset = length - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def damage_after(fd: int, offset: int, seq: int) -> int | None:
    """Where a good frame with a sequence number above `seq` begins, behind the bad bytes at `offset`; None if the tail is just torn."""
    size = os.fstat(fd).st_size
    at = offset + 1
    while at < size:
        block = os.pread(fd, _SCAN + len(_MAGIC), at)
        found = block.find(_MAGIC)
        while found >= 0:
            head = os.pread(fd, _HEAD.size, at + found)
            if len(head) == _HEAD.size:
                _, length, later, crc = _HEAD.unpack(head)
                whole = seq < later and at + found + _HEAD.size + length <= size
                if whole and zlib.crc32(_read(fd, length, at + found + _HEAD.size), zlib.crc32(head[4:16])) == crc:
                    return at + found
            found = block.find(_MAGIC, found + 1)
        at += _SCAN
    return None


class Draft:
    """A journal on its way in, under a temporary name: nothing of it counts before `finish`. A failure of any step leaves no trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._end = self._count = 0
        self._tried = False

    def write(self, payloads: Iterable[bytes]) -> None:
        """Frames with these payloads, on the disk when this returns."""
        with self._dropped_on_failure():
            for payload in payloads:
                data = frame(self._count, payload)
                write_all(self._fd, data, self._end)
                self._end, self._count = self._end + len(data), self._count + 1
            os.fsync(self._fd)

    def finish(self) -> JournalWriter:
        """Rename it: from now on it is the newest journal."""
        with self._dropped_on_failure():
            self._tried = True
            os.rename(self._temporary, self._path)
        sync_directory(self._path.parent)
        return JournalWriter(self._path, self._fd, self._end, self._count)

    def may_count(self) -> bool:
        """Whether it has its name already, or may have: a `finish` that failed can have come that far."""
        try:
            return self._tried and self._path.exists()
        except OSError:  # it can't be told
            return True

    def drop(self) -> None:
        """Leave no trace."""
        try:
            self._temporary.unlink(missing_ok=True)
        finally:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise


class JournalWriter:
    """Appends frames to one file; one thread at a time."""

    def __init__(self, path: Path, fd: int, end: int, seq: int) -> None:
        self.path = path
        self._fd = fd
        self._end = end
        self._seq = seq
        self._broken = False
        self._room = end
        """Where the zeros end that were written ahead."""
        self._ahead = True

    @staticmethod
    def create(path: Path, payloads: Iterable[bytes]) -> JournalWriter:
        """A new journal that holds these payloads, complete and durable under its name at once. OSError leaves no trace."""
        draft = Draft(path)
        draft.write(payloads)
        return draft.finish()

    @staticmethod
    def recover(path: Path) -> tuple[JournalWriter, Iterator[bytes]]:
        """Open an existing journal: the writer, and the payloads of its whole frames. Exhaust the iterator before appending:
        its end cuts the torn tail. The iterator raises StoreError if acknowledged data are damaged."""
        journal = JournalWriter(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), 0, 0)
        return journal, journal._replay()

    def _replay(self) -> Iterator[bytes]:
        scan = Scan(self._fd)
        yield from scan.frames()
        later = damage_after(self._fd, scan.offset, scan.seq)
        if later is not None:
            raise Damaged(
                f"{self.path} is damaged at byte {scan.offset}: a good frame follows at byte {later}",
                "restore this file from a copy, or run gyre trees repair; nothing was changed",
            )
        if os.fstat(self._fd).st_size > scan.offset:
            os.ftruncate(self._fd, scan.offset)
            os.fsync(self._fd)
        self._end, self._seq, self._room = scan.offset, scan.seq, scan.offset

    def append(self, payload: bytes) -> None:
        """One frame, on the disk when this returns. OSError: the file is as before and the same call may be made again."""
        if self._broken:
            raise StoreError(f"{self.path} can't be written any more after a failed write", "close the store and open it again")
        data = frame(self._seq, payload)
        try:
            if self._ahead and self._end + len(data) > self._room and len(data) <= _SMALL:
                self._make_room(self._end + len(data))
            write_all(self._fd, data, self._end)
            os.fdatasync(self._fd)
        except BaseException:
            self._take_back()
            raise
        self._end += len(data)
        self._seq += 1

    def _make_room(self, end: int) -> None:
        """Zeros behind `end`. A disk without that much room gets the frame alone."""
        try:
            write_all(self._fd, bytes(AHEAD), end)
            self._room = end + AHEAD
        except OSError:
            self._ahead = False
            os.ftruncate(self._fd, self._end)
            self._room = self._end

    def _take_back(self) -> None:
        self._ahead = False
        try:
            os.ftruncate(self._fd, self._end)
            self._room = self._end
            os.fsync(self._fd)
        except OSError:
            self._broken = True

    def conclude(self) -> None:
        """An empty last frame, if there is room: damage to the last commit is told from a torn tail by it. Nothing else needs it."""
        if not self._broken:
            with suppress(OSError):
                self.append(b"")

    def refuse(self) -> None:
        """Append nothing more: another journal may have taken this one's place."""
        self._broken = True

    @property
    def size(self) -> int:
        """Bytes of frames on the disk."""
        return self._end

    def close(self) -> None:
        """Cut what was written ahead."""
        if self._fd < 0:
            return
        try:
            if self._room > self._end and not self._broken:
                os.ftruncate(self._fd, self._end)
        finally:
            os.close(self._fd)
            self._fd = -1
