"""One driver per run: refusal, take-over of stale locks, and the loss of a lock."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gyre_hpc.driver import runlock
from gyre_hpc.driver.runlock import Holder, RunLock, live_holder, read_holder
from gyre_hpc.errors import GyreError, Resumable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "driver.lock"


def write(path: Path, holder: Holder) -> None:
    path.write_text(json.dumps(asdict(holder)))


def elsewhere(job: str | None = None) -> Holder:
    return Holder("another-host", 1, 0.0, job, "token")


def test_a_second_driver_is_refused_with_one_line_that_names_the_first(path: Path) -> None:
    with RunLock(path):
        with pytest.raises(GyreError, match=rf"{socket.gethostname()} pid {os.getpid()}"):
            RunLock(path).__enter__()
        assert live_holder(path) is not None
    assert sorted(p.name for p in path.parent.iterdir()) == []


def test_the_lock_of_a_dead_process_is_taken_over(path: Path) -> None:
    code = f"import os, pathlib; from gyre_hpc.driver.runlock import RunLock; RunLock(pathlib.Path({str(path)!r})).__enter__(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert live_holder(path) is None
    with RunLock(path) as lock:
        holder = read_holder(path)
        assert holder is not None
        assert holder.token == lock.me.token
    assert list(path.parent.iterdir()) == []


def test_a_reused_pid_is_not_taken_for_the_holder(path: Path) -> None:
    write(path, replace(RunLock(path).me, started=1.0, token="old"))
    with RunLock(path) as lock:
        assert runlock.read_holder(path) == lock.me


def test_another_host_counts_as_alive_until_it_is_silent_by_the_file_systems_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, elsewhere())
    with pytest.raises(GyreError, match="another-host"):
        RunLock(path).__enter__()
    then = path.stat().st_mtime - runlock.STALE - 1
    os.utime(path, (then, then))
    with RunLock(path) as lock:
        assert runlock.read_holder(path) == lock.me


def test_a_requeued_job_takes_over_from_its_own_earlier_attempt_on_another_node(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write(path, elsewhere("7"))
    with RunLock(path) as lock:
        assert runlock.read_holder(path) == lock.me


@pytest.mark.parametrize(("state", "stale"), [("RUNNING", False), ("COMPLETED", True)])
def test_slurm_is_asked_about_another_job(path: Path, monkeypatch: pytest.MonkeyPatch, state: str, stale: bool) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(runlock, "ask", lambda command: f"JobId=7 JobState={state}\n")
    write(path, elsewhere("7"))
    assert (live_holder(path) is None) is stale


def test_the_lock_in_a_copy_of_a_running_runs_folder_holds_nobody_up(path: Path, tmp_path: Path) -> None:
    with RunLock(path):
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        shutil.copy2(path, copy)
        assert live_holder(path) is not None
        assert live_holder(copy) is None
        with RunLock(copy) as other:
            assert read_holder(copy) == other.me
        moved = tmp_path / "moved"
        path.rename(moved)
        assert live_holder(moved) is not None, "a folder that is moved under its driver is still the driver's"
        moved.rename(path)
        link = tmp_path / "link"
        link.symlink_to(path.parent, target_is_directory=True)
        assert live_holder(link / path.name) is not None


def test_a_broken_lock_file_is_taken_over(path: Path) -> None:
    path.write_text("")
    with RunLock(path) as lock:
        assert runlock.read_holder(path) == lock.me


def test_a_disk_that_is_full_is_told_with_the_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunLock, "_here", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"), RunLock(path):
        pass
    assert list(path.parent.iterdir()) == []


def test_a_driver_that_lost_its_lock_must_stop(path: Path) -> None:
    with RunLock(path) as lock:
        lock.renew()
        write(path, elsewhere())
        with pytest.raises(Resumable, match="another-host"):
            lock.renew()
    assert path.exists()  # the other's lock stays


def test_of_two_that_take_over_at_once_the_later_is_refused(path: Path) -> None:
    stale = elsewhere()
    second = RunLock(path)
    write(path, replace(RunLock(path).me, token="first"))  # the first has taken over since `second` judged `stale`
    with pytest.raises(Resumable, match="is being run by"):
        second._move_aside(stale)
    holder = read_holder(path)
    assert holder is not None
    assert holder.token == "first"


def test_two_that_look_at_a_lock_at_once_do_not_take_each_other_s_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one pid, on two nodes: a clock that is gone would make a lock that lives look stale."""
    lock = tmp_path / "lock"
    lock.touch()
    touch, others = Path.touch, [True]

    def meanwhile(path: Path) -> None:
        touch(path)
        if others and others.pop():
            assert runlock._age(lock) < runlock.STALE

    monkeypatch.setattr(Path, "touch", meanwhile)
    assert runlock._age(lock) < runlock.STALE
    assert list(tmp_path.iterdir()) == [lock]
