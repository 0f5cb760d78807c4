"""Files and directories that are whole or absent after a crash: written under a temporary name, synced, renamed, parent synced.

Invariant: what stands under the final name was complete when it got that name; leftovers end in `.partial` or `.old` and mean nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

LEFTOVERS = (".partial", ".old")


def sync(path: Path) -> None:
    """fsync one file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below and including `directory`."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))


def beside(path: Path, suffix: str) -> Path:
    """`path` with a suffix after its whole name."""
    return path.with_name(path.name + suffix)


def clear_leftovers(parent: Path) -> None:
    """Remove what interrupted writers left in `parent`; only for the one writer of `parent`. What can't be removed is logged and stays."""
    for child in parent.iterdir() if parent.is_dir() else ():
        if child.name.endswith(LEFTOVERS):
            try:
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            except OSError as error:
                log.warning("leftover %s not removed: %s", child, error)


def publish_directory(partial: Path, final: Path) -> None:
    """Give the finished `partial` its final name, durably; an older `final` is replaced."""
    sync_tree(partial)
    old = beside(final, ".old")
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def replace_directory(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a fresh directory, then publish it as `final`. If `write` raises, nothing of it stays."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(final, ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        write(partial)
        publish_directory(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
