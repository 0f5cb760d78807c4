import os

import pytest

from trees.errors import StoreError
from trees.journal import JournalWriter, Scan, frame, newest_journal

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

    def fail(fd):
        raise OSError(28, "no space left")

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
