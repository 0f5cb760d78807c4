"""The workspace of an execution: made from the task's files, preserved until it is scored and released.

Invariants: nothing here follows a symbolic link, opens anything but a regular file, or trusts a name that an agent chose; every walk is
bounded by the caps, so that millions of files or a path deeper than the kernel takes cost no more than the caps say.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.errors import GyreError

_MIB = 1 << 20


@dataclass(frozen=True)
class Caps:
    """What a workspace may grow to: bytes (apparent sizes, so that sparse files count in full) and directory entries."""

    size: int = 64 * _MIB
    entries: int = 20_000


@dataclass(frozen=True)
class Usage:
    """What a walk found; `over` when it stopped at a cap (or at a path too deep to name)."""

    size: int
    entries: int
    over: bool


@dataclass(frozen=True)
class Folder:
    """The folder of one execution below RUN/workspaces: the workspace, the harness's output, and one folder per verifier run."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def log(self) -> Path:
        return self.root / "harness.log"

    def verifier(self, attempt: int) -> Path:
        """Bound to /logs/verifier; fresh for every run."""
        return self.root / f"verifier-{attempt}"


def folder_of(workspaces: Path, attempt: int, execution: int) -> Folder:
    """The name tells the run's attempt, so that a later attempt knows what was left behind."""
    return Folder(workspaces / f"{attempt:03d}-{execution}")


def prepare(folder: Folder, environment: Path, caps: Caps) -> None:
    """Make a fresh workspace from a task's `environment` folder (its Dockerfile left out).

    Raises GyreError; a full disk stays an OSError, because it must stop the run instead of one execution after the other.
    """
    remove(folder.root)
    try:
        folder.root.mkdir(parents=True)
        folder.work.mkdir()
        if environment.is_dir():
            copy(environment, folder.work, caps, skip=frozenset({"Dockerfile", "docker-compose.yaml"}))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise GyreError(f"workspace {folder.root}: {error.strerror}", "make the run directory and the task's files accessible") from error


def copy(source: Path, target: Path, caps: Caps, skip: frozenset[str] = frozenset()) -> None:
    """Copy a tree into an existing folder: files, folders, links as links. Raises GyreError at the caps; special files stay behind.

    `skip`: names of the top folder to leave out.
    """
    size = entries = 0
    pending = [(source, target)]
    while pending:
        here, there = pending.pop()
        with os.scandir(here) as found:
            for entry in found:
                if here is source and entry.name in skip:
                    continue
                info = entry.stat(follow_symlinks=False)
                entries += 1
                size += info.st_size if stat.S_ISREG(info.st_mode) else 0
                if entries > caps.entries or size > caps.size:
                    raise GyreError(
                        f"{source} is over {caps.entries} entries or {caps.size // _MIB} MiB", "raise harness.inodes or harness.disk_mb"
                    )
                _copy_one(entry, info, there / entry.name, pending)


def _copy_one(entry: os.DirEntry[str], info: os.stat_result, target: Path, pending: list[tuple[Path, Path]]) -> None:
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(entry.path), target)
    elif stat.S_ISDIR(info.st_mode):
        target.mkdir(mode=0o755)
        pending.append((Path(entry.path), target))
    elif stat.S_ISREG(info.st_mode):
        reading = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(reading, "rb") as source, open(target, "xb") as copied:
            shutil.copyfileobj(source, copied)
            os.fchmod(copied.fileno(), 0o644 | (info.st_mode & 0o111))


def usage(work: Path, caps: Caps) -> Usage:
    """What is in a workspace now; never more work than the caps allow. Folders that can't be read count as empty."""
    size = entries = 0
    pending = [str(work)]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        size += entry.stat(follow_symlinks=False).st_size
                    if entries > caps.entries or size > caps.size:
                        return Usage(size, entries, over=True)
        except (PermissionError, FileNotFoundError, NotADirectoryError):  # closed by the agent, or gone while it works
            continue
        except OSError:
            return Usage(size, entries, over=True)
    return Usage(size, entries, over=False)


def remove(root: Path) -> None:
    """Delete a tree, whatever modes, depths and names are in it. Raises GyreError when something stays."""
    try:
        shutil.rmtree(root)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        pass
    try:
        _remove_flat(root)
    except OSError as error:
        raise GyreError(f"{root} can't be removed: {error.strerror}", "remove it by hand") from None


def _remove_flat(root: Path) -> None:
    """Delete a tree that is too deep or closed for rmtree: every folder is moved next to `root` before it is emptied."""
    beside = root.with_name(f".{root.name}.removed")
    beside.mkdir(exist_ok=True)
    pending = [str(root), *(entry.path for entry in os.scandir(beside))]
    moved = len(pending)
    while pending:
        folder = pending.pop()
        os.chmod(folder, 0o700)
        with os.scandir(folder) as found:
            for entry in found:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                pending.append(str(beside / str(moved)))
                os.rename(entry.path, pending[-1])
                moved += 1
        os.rmdir(folder)
    beside.rmdir()


def sweep(workspaces: Path, attempt: int) -> int:
    """Remove what attempts before this one left behind; returns how many folders. Several supervisors may sweep at once."""
    if not workspaces.is_dir():
        return 0
    stale = [path for path in workspaces.iterdir() if path.name.split("-")[0].isdigit() and int(path.name.split("-")[0]) < attempt]
    for path in stale:
        remove(path)
    return len(stale)
