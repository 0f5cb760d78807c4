"""Runs a script of this folder on several MPI ranks, in an environment that no outer MPI or Slurm step leaks into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LEAKS = ("PMI", "PMIX", "OMPI", "MPI", "SLURM_", "HYDRA", "HYDI")


def clean_environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEAKS)}
    root = str(Path(__file__).resolve().parents[2])
    return {**env, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def run_ranks(script: str, ranks: int, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert mpiexec is not None, "no mpiexec: install the mpich wheel"
    command = [mpiexec, "-n", str(ranks), sys.executable, str(Path(__file__).parent / script), *arguments]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=timeout)


def check_ranks(script: str, ranks: int, *arguments: str) -> None:
    """Every rank must reach its end and say so: a script that checks nothing, or on fewer ranks, fails."""
    done = run_ranks(script, ranks, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(re.findall(rf"passed (\d+) of {ranks}", done.stdout))  # mpiexec does not keep the ranks' lines apart
    assert said == [str(rank) for rank in range(ranks)], done.stdout + done.stderr
