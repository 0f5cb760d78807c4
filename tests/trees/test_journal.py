import os
import random

import pytest

from trees.errors import StoreError
from trees.journal import AHEAD, JournalWriter, Scan, frame, newest_journal

FRAMES = [b"header", b"first" * 9, b"second" * 7, b"the last one" * 5]


def recovered(path):
    journal, payloads = JournalWriter.recover(path)
    return journal, list(payloads)


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal-000001.log"
    writer = JournalWriter.create(path, FRAMES[:1])
    for payload in FRAMES[1:]:
        writer.append(payload)
    writer.close()
    return path


def test_a_tail_torn_at_any_byte_is_cut_and_the_journal_goes_on(journal):
    data = journal.read_bytes()
    last = len(data) - len(frame(3, FRAMES[3]))
    for end in range(last, len(data)):
        journal.write_bytes(data[:end])
        writer, payloads = recovered(journal)
        assert payloads == FRAMES[:3]
        assert journal.stat().st_size == last
        writer.append(b"after")
        writer.close()
        writer, payloads = recovered(journal)
        writer.close()
        assert payloads == [*FRAMES[:3], b"after"]


def test_a_last_frame_with_any_wrong_byte_is_cut(journal):
    data = journal.read_bytes()
    last = len(data) - len(frame(3, FRAMES[3]))
    for at in range(last, len(data)):
        journal.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        writer, payloads = recovered(journal)
        writer.close()
        assert payloads == FRAMES[:3]
        assert journal.stat().st_size == last


def test_damage_before_the_last_frame_is_refused_and_nothing_is_cut(journal):
    data = journal.read_bytes()
    first = len(frame(0, FRAMES[0]))
    for at in range(first, first + len(frame(1, FRAMES[1]))):
        damaged = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        journal.write_bytes(damaged)
        with pytest.raises(StoreError, match="a good frame follows"):
            recovered(journal)
        assert journal.read_bytes() == damaged


def test_a_scan_goes_on_when_the_file_has_grown(journal):
    data = journal.read_bytes()
    journal.write_bytes(b"")
    fd = os.open(journal, os.O_RDONLY)
    scan, seen = Scan(fd), []
    for end in range(0, len(data) + 1, 7):
        journal.write_bytes(data[:end])
        seen += scan.frames()
        assert not scan.bad
    journal.write_bytes(data)
    seen += scan.frames()
    os.close(fd)
    assert seen == FRAMES


def test_a_length_that_lies_allocates_nothing(journal):
    journal.write_bytes(journal.read_bytes() + frame(4, b"x")[:4] + b"\xff\xff\xff\xff" + bytes(20))
    writer, payloads = recovered(journal)
    writer.close()
    assert payloads == FRAMES


def test_a_failed_sync_takes_the_frame_back(journal, monkeypatch):
    writer, payloads = recovered(journal)
    assert payloads == FRAMES
    before = journal.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="no space left"):
            writer.append(b"lost")
    assert journal.read_bytes() == before
    writer.append(b"kept")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        patch.setattr(os, "ftruncate", fail_truncate)
        with pytest.raises(OSError, match="no space left"):
            writer.append(b"lost")
    with pytest.raises(StoreError, match="open it again"):
        writer.append(b"never")
    writer.close()


def fail_truncate(fd, length):
    raise OSError(5, "input/output error")


def test_a_listing_that_shows_no_journal_is_not_believed_at_once(journal, monkeypatch):
    directory = journal.parent
    listings = [["writer.lock"], ["writer.lock"], ["journal-000001.log", "writer.lock"]]
    monkeypatch.setattr(os, "listdir", lambda where: listings.pop(0))
    assert newest_journal(directory) == 1
    monkeypatch.setattr(os, "listdir", lambda where: ["writer.lock"])
    assert newest_journal(directory) is None


def test_room_is_written_ahead_and_cut_when_the_journal_is_closed(journal):
    whole = journal.read_bytes()
    writer, _ = recovered(journal)
    writer.append(b"small")
    size = journal.stat().st_size
    assert size == writer.size + AHEAD
    for _ in range(20):
        writer.append(bytes(1000))
    assert journal.stat().st_size == size, "no commit in the room changes the size"
    writer.append(b"x" * (AHEAD - 1000))
    large = writer.size
    assert journal.stat().st_size == large, "nothing is written ahead of a large frame"
    writer.close()
    data = journal.read_bytes()
    assert data[: len(whole)] == whole
    assert len(data) == large


def test_a_crash_with_room_ahead_loses_and_adds_nothing_whatever_blocks_arrived(journal):
    """A power cut keeps any subset of the last frame's blocks; the others still hold the zeros that were written ahead."""
    start = journal.read_bytes()
    rng = random.Random(1)
    last = frame(4, rng.randbytes(3000))
    blocks = range(0, len(last), 512)
    for _ in range(60):
        kept = {at for at in blocks if rng.random() < 0.7} - {rng.choice(blocks)}
        torn = b"".join(last[at : at + 512] if at in kept else bytes(len(last[at : at + 512])) for at in blocks)
        journal.write_bytes(start + torn + bytes(AHEAD))
        writer, payloads = recovered(journal)
        assert payloads == FRAMES
        assert journal.read_bytes() == start
        writer.append(b"after")
        assert journal.stat().st_size == writer.size + AHEAD  # a process that is killed here leaves the room behind
        again, payloads = recovered(journal)
        assert payloads == [*FRAMES, b"after"]
        again.close()
        writer.close()


def test_damage_is_told_from_room(journal):
    """Zeros over an acknowledged frame, with a good one behind it, are damage."""
    data = journal.read_bytes()
    first, second = len(frame(0, FRAMES[0])), len(frame(1, FRAMES[1]))
    journal.write_bytes(data[:first] + bytes(second) + data[first + second :] + bytes(AHEAD))
    with pytest.raises(StoreError, match="a good frame follows"):
        recovered(journal)


def test_a_reader_beside_the_writer_sees_the_end_in_the_room_and_a_frame_taken_back(journal, monkeypatch):
    writer, _ = recovered(journal)
    writer.append(b"small")
    fd = os.open(journal, os.O_RDONLY)
    scan = Scan(fd)
    assert list(scan.frames()) == [*FRAMES, b"small"]
    assert not scan.bad
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: seen.extend(scan.frames()) or fail(fd))
        seen = []
        with pytest.raises(OSError, match="no space left"):
            writer.append(b"seen and taken back")
        assert seen == [b"seen and taken back"]
    assert os.fstat(fd).st_size < scan.offset
    writer.append(b"short")
    assert os.fstat(fd).st_size < scan.offset, "the size tells, also after the next frame"
    os.close(fd)
    writer.close()


def test_a_disk_without_room_ahead_takes_the_frame(journal, monkeypatch):
    writer, _ = recovered(journal)
    whole = journal.read_bytes()
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data, at) if len(data) < AHEAD else fail(fd))
    writer.append(b"fits")
    assert journal.read_bytes() == whole + frame(4, b"fits")
    writer.close()


def fail(fd):
    raise OSError(28, "no space left")
