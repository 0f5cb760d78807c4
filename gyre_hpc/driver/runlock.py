"""One driver per run directory: RUN/driver.lock names the host, process and job that has it.

Invariants: the file is created exclusively (works on NFS, Lustre and GPFS, where flock may not) and renewed every few seconds. It is
stale when its process is gone (same host), when its job is this one (an earlier attempt of a requeued job) or Slurm no longer runs it,
when it has not been renewed for `STALE` seconds by the file system's own clock, or when it came along with a copy of another run's
directory: it then names another file at another place. A stale lock is moved aside, and looked at again after
the move: of two that take over at once, one wins and the other is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import psutil

from gyre_hpc.driver.allocation import ask, inside_slurm, job_command, parse_job
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.paths import naming

RENEW = 10.0
STALE = 60.0


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `started`: of the process, seconds since the epoch, so that a reused pid is not taken for it.

    `place` and `inode`: of the lock file itself (0: not known); both are others in a copy.
    """

    host: str
    pid: int
    started: float
    job: str | None
    token: str
    place: str = ""
    inode: int = 0

    def describe(self) -> str:
        return f"{self.host} pid {self.pid}" + (f" (job {self.job})" if self.job else "")


class RunLock:
    """A context manager around the life of a driver; `renew` must be called every `RENEW` seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        job = os.environ.get("SLURM_JOB_ID")
        self.me = Holder(socket.gethostname(), os.getpid(), psutil.Process().create_time(), job, uuid.uuid4().hex)

    def __enter__(self) -> RunLock:
        while not self._create():
            holder = read_holder(self.path)
            if holder is not None and not is_stale(self.path, holder):
                raise refusal(self.path, holder)
            self._move_aside(holder)
        return self

    def __exit__(self, *_: object) -> None:
        holder = read_holder(self.path)
        if holder is not None and holder.token == self.me.token:
            self.path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Show that we live. Raises Resumable if the lock is not ours any more: two drivers must not write one run."""
        holder = read_holder(self.path)
        if holder is None or holder.token != self.me.token:
            who = "nobody" if holder is None else holder.describe()
            raise Resumable(f"lost the run's lock {self.path} to {who}", "see which of the two drivers should run")
        os.utime(self.path)

    def _create(self) -> bool:
        """Create the lock, whole at once. A full disk leaves nothing behind."""
        temporary = self.path.with_name(f".{self.path.name}.{self.me.token}")
        try:
            with naming(self.path):
                with open(temporary, "w") as f:
                    self.me = self._here(f)
                    f.write(json.dumps(asdict(self.me)))
                return self._take_name(temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def _take_name(self, whole: Path) -> bool:
        """By a hard link; by exclusive creation where the file system has no links. False if the name is taken."""
        try:
            os.link(whole, self.path)
        except FileExistsError:
            return False
        except OSError:
            try:
                with open(self.path, "x") as f:
                    self.me = self._here(f)
                    f.write(json.dumps(asdict(self.me)))
            except FileExistsError:
                return False
        return True

    def _here(self, file: TextIO) -> Holder:
        """Ourselves, as the holder of what is written into this file."""
        return replace(self.me, place=str(self.path.resolve()), inode=os.fstat(file.fileno()).st_ino)

    def _move_aside(self, judged: Holder | None) -> None:
        aside = self.path.with_name(f".{self.path.name}.stale-{self.me.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        moved = read_holder(aside)
        if moved is not None and (judged is None or moved.token != judged.token):  # somebody else took over between our look and our move
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
            aside.unlink()
            raise refusal(self.path, moved)
        aside.unlink()


def refusal(path: Path, holder: Holder) -> Resumable:
    """Nothing is wrong, and the same command goes on later: exit 75."""
    return Resumable(f"{path.parent} is being run by {holder.describe()}", "wait for it or stop it; `gyre status` shows how far it is")


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None if nobody does or the file is broken (its writer died)."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def live_holder(path: Path) -> Holder | None:
    """Who holds the lock and lives."""
    holder = read_holder(path)
    return None if holder is None or is_stale(path, holder) else holder


def is_stale(path: Path, holder: Holder) -> bool:
    """Whether the holder is gone for certain, or silent for too long, or holds another directory, of which this is a copy."""
    if _is_copy(path, holder):
        return True
    if holder.host == socket.gethostname():
        return not _lives(holder)
    if holder.job is not None and inside_slurm() and not _job_runs(holder.job):
        return True
    return _age(path) > STALE


def _is_copy(path: Path, holder: Holder) -> bool:
    """Both must differ: one file has several names where a file system is mounted twice, and some renumber their files."""
    try:
        return bool(holder.inode) and holder.inode != path.stat().st_ino and holder.place != str(path.resolve())
    except FileNotFoundError:
        return False


def _lives(holder: Holder) -> bool:
    try:
        process = psutil.Process(holder.pid)
        return bool(abs(process.create_time() - holder.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _job_runs(job: str) -> bool:
    if job == os.environ.get("SLURM_JOB_ID"):
        return False  # our own job, requeued: its earlier attempt is over
    try:
        return parse_job(ask(job_command(job))).get("JobState") in {"RUNNING", "COMPLETING", "SUSPENDED"}
    except GyreError as error:
        return "Invalid job id" not in error.what


def _age(path: Path) -> float:
    """Seconds since the last renewal by the clock of the file system (those of the nodes differ)."""
    probe = path.with_name(f".{path.name}.clock-{uuid.uuid4().hex}")  # nodes that booted alike hand out the same pids
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
    finally:
        probe.unlink()
