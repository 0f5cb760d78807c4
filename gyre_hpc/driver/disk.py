"""Free space of the run directory's file system: refused at the start when there is too little, a graceful stop before it is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

from gyre_hpc.errors import Resumable

MB = 1024 * 1024


def free_mb(folder: Path) -> int:
    """MiB free for this user on the folder's file system."""
    return shutil.disk_usage(folder).free // MB


def check_start(folder: Path, needed: int) -> None:
    """Raises Resumable if fewer than `needed` MiB are free."""
    free = free_mb(folder)
    if free < needed:
        raise Resumable(f"{folder}: {free} MiB free, a run starts with run.min_free_mb = {needed}", "free space, or set run.dir elsewhere")


def check_running(folder: Path, needed: int) -> Resumable | None:
    """The reason to stop, when a quarter of `needed` MiB or less is left."""
    free = free_mb(folder)
    if free * 4 > needed or needed == 0:
        return None
    return Resumable(f"{folder}: {free} MiB free, the disk is nearly full", "free space; the same command resumes")
