import json
import os

import pytest

from trees.errors import StoreError
from trees.files import WriterLock, write_durably
from trees.records import Group
from trees.store import StoreWriter


def test_one_writer_at_a_time_and_a_stale_lock_is_taken_over(tmp_path):
    with StoreWriter(tmp_path) as first:
        with pytest.raises(StoreError, match=f"held by process {os.getpid()}"):
            StoreWriter(tmp_path)
        usurper = WriterLock(tmp_path / "writer.lock", take_over=True)
        first.append(Group(0, "t", 1, 0, 0))
        with pytest.raises(StoreError, match="taken by another writer"):
            first.commit()
        usurper.release()
        with pytest.raises(StoreError, match="taken by another writer"):
            first.close()
    child = os.fork()
    if child == 0:
        StoreWriter(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "writer.lock").exists()
    StoreWriter(tmp_path).close()
    assert not (tmp_path / "writer.lock").exists()
    (tmp_path / "writer.lock").write_text(json.dumps({"host": "elsewhere", "boot": "", "pid": 1, "start": "1"}))
    with pytest.raises(StoreError, match="on elsewhere"):
        StoreWriter(tmp_path)
    StoreWriter(tmp_path, take_over=True).close()


def test_the_lock_of_a_process_with_a_used_again_pid_is_stale(tmp_path):
    path = tmp_path / "writer.lock"
    lock = WriterLock(path)
    holder = json.loads(path.read_bytes())
    path.write_text(json.dumps({**holder, "start": "1"}))
    WriterLock(path).release()
    path.write_text(json.dumps({**holder, "boot": "another"}))
    WriterLock(path).release()
    path.write_text("")
    WriterLock(path).release()
    lock.release()
    assert not path.exists()


def test_a_file_is_whole_or_absent(tmp_path):
    def parts():
        yield b"one"
        yield b"two"
        if fail:
            raise OSError(28, "no space left")

    fail = True
    with pytest.raises(OSError, match="no space left"):
        write_durably(tmp_path / "file", parts())
    assert list(tmp_path.iterdir()) == []
    fail = False
    assert write_durably(tmp_path / "file", parts()) == 6
    assert (tmp_path / "file").read_bytes() == b"onetwo"
    assert len(list(tmp_path.iterdir())) == 1
