"""Starting the processes of a run: as plain children with `mpiexec` on one machine, or as srun steps of the allocation.

Invariants: the gateway is a plain child of the driver in both cases (the driver is on the first node); every child dies with the driver
(the kernel's parent-death signal; srun gets TERM, so that it ends its step); environments are built, not inherited: launcher variables of
the driver's own surroundings (SLURM_*, PMI*) never reach a child by accident. A program never waits for Slurm for ever: it must leave its
mark (driver/step.py) within the start deadline.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gyre_hpc import processes
from gyre_hpc.driver import step, world
from gyre_hpc.driver.allocation import Allocation, Placement, ask
from gyre_hpc.errors import GyreError

MPI_STEP = "mpi"
STEP_PREFIX = "gyre-"
CANCELLED = 10.0
"""Seconds for steps to be gone after scancel."""
_LOOK = 0.25


@dataclass(frozen=True)
class Child:
    """One started process (for an MPI step or another node: the local client that stands for it); `marks` counts its start marks."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    marks: int


@dataclass(frozen=True)
class Surroundings:
    """Where children leave their marks and logs, and what their environment has on top of the scrubbed one."""

    folder: Path
    logs: Path
    extra: Mapping[str, str]


class Launcher(Protocol):
    """Starts children. `close` ends what a killed client may have left elsewhere, of the child `name` only where one is given."""

    def child(self, name: str, argv: Sequence[str], where: Surroundings) -> Child:
        """A plain child on the driver's node."""
        ...

    def on_node(self, name: str, node: str, argv: Sequence[str], where: Surroundings) -> Child:
        """One process on one node of the allocation."""
        ...

    def mpi(self, argv: Sequence[str], placement: Placement, where: Surroundings) -> Child:
        """One MPI world, the ranks placed as told."""
        ...

    def close(self, name: str = "") -> None: ...


def started(child: Child, folder: Path) -> list[dict[str, Any]]:
    """The start marks {pid, node, rank} that the processes of a child have left so far."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"started-{child.name}.*json"))]


def step_argv(name: str, argv: Sequence[str], folder: Path) -> list[str]:
    return [sys.executable, "-I", "-S", step.__file__, str(folder), name, "--", *argv]


def mpiexec_path() -> str:
    """The mpiexec of this environment's mpich wheel, else the one on PATH. Raises GyreError."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise GyreError("mpiexec not found", "pip install mpich (the wheel brings it), or start inside a Slurm allocation")
    return found


def mpiexec_command(argv: Sequence[str], ranks: int, labelled: bool = True) -> list[str]:
    """`-launcher fork`: hydra otherwise asks Slurm or ssh when it finds signs of them. `labelled`: every line says its rank."""
    return [mpiexec_path(), "-launcher", "fork", *(["-prepend-rank"] if labelled else []), "-n", str(ranks), *argv]


def srun_command(name: str, argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """`--overlap`: steps share the nodes; `--cpu-bind=none`: a rank may use all cores of the job on its node."""
    return [
        "srun",
        f"--job-name={STEP_PREFIX}{name}",
        "--overlap",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--input=none",
        *options,
        *argv,
    ]


class LocalLauncher:
    """Everything on this machine."""

    def child(self, name: str, argv: Sequence[str], where: Surroundings) -> Child:
        return _spawn(name, step_argv(name, argv, where.folder), where, 1)

    def on_node(self, name: str, node: str, argv: Sequence[str], where: Surroundings) -> Child:
        return self.child(name, argv, where)

    def mpi(self, argv: Sequence[str], placement: Placement, where: Surroundings) -> Child:
        ranks = len(placement.ranks)
        surroundings = replace(where, extra={**where.extra, **world.settings()})
        return _spawn(MPI_STEP, mpiexec_command(step_argv(MPI_STEP, argv, where.folder), ranks), surroundings, ranks)

    def close(self, name: str = "") -> None:
        """Nothing lives elsewhere."""


class SlurmLauncher:
    """srun steps inside the allocation `job`; `options` are the site's own (slurm.srun_options)."""

    def __init__(self, job: str, options: Sequence[str] = ()) -> None:
        self.job = job
        self.options = tuple(options)

    def child(self, name: str, argv: Sequence[str], where: Surroundings) -> Child:
        return _spawn(name, step_argv(name, argv, where.folder), where, 1)

    def on_node(self, name: str, node: str, argv: Sequence[str], where: Surroundings) -> Child:
        options = ["--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *self.options]
        return self._srun(name, step_argv(name, argv, where.folder), options, where, 1)

    def mpi(self, argv: Sequence[str], placement: Placement, where: Surroundings) -> Child:
        hosts = where.folder / "hostfile"
        hosts.write_text("".join(f"{node}\n" for node in placement.ranks))
        ranks = len(placement.ranks)
        size = [f"--nodes={len(set(placement.ranks))}", f"--ntasks={ranks}"]
        options = ["--mpi=pmi2", *size, "--distribution=arbitrary", "--label", *self.options]
        extra = {**world.settings(), "SLURM_HOSTFILE": str(hosts)}
        return self._srun(MPI_STEP, step_argv(MPI_STEP, argv, where.folder), options, where, ranks, extra)

    def close(self, name: str = "") -> None:
        """Cancel the steps of ours that still run in the allocation (an srun that was killed leaves its tasks behind), and wait until they
        are gone: who comes next needs their devices. Raises GyreError when they stay."""
        left = parse_steps(ask(steps_command(self.job)), name)
        if left:
            ask(["scancel", "--signal=KILL", *left])
        end = time.monotonic() + CANCELLED
        while left:
            if time.monotonic() > end:
                raise GyreError(f"Slurm steps {', '.join(left)} are still there {CANCELLED:.0f} s after scancel", "see the nodes' slurmd")
            time.sleep(_LOOK)
            left = parse_steps(ask(steps_command(self.job)), name)

    def _srun(
        self,
        name: str,
        argv: Sequence[str],
        options: Sequence[str],
        where: Surroundings,
        marks: int,
        extra: Mapping[str, str] | None = None,
    ) -> Child:
        kept = {key: os.environ[key] for key in ("SLURM_CONF",) if key in os.environ}
        surroundings = Surroundings(where.folder, where.logs, {**where.extra, **kept, "SLURM_JOB_ID": self.job, **(extra or {})})
        return _spawn(name, srun_command(name, argv, options), surroundings, marks, slurm=True)


def make_launcher(allocation: Allocation, srun_options: Sequence[str] = ()) -> Launcher:
    """The launcher that fits the allocation."""
    return LocalLauncher() if allocation.job is None else SlurmLauncher(allocation.job, srun_options)


def steps_command(job: str) -> list[str]:
    return ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"]


def parse_steps(text: str, name: str = "") -> list[str]:
    """Ids of the steps that carry our name, or that of the child `name`."""
    rows = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    ours = [(row[0], row[1].strip()) for row in rows if len(row) == 2]
    return [step for step, title in ours if (title == STEP_PREFIX + name if name else title.startswith(STEP_PREFIX))]


def _spawn(name: str, argv: Sequence[str], where: Surroundings, marks: int, slurm: bool = False) -> Child:
    log = where.logs / f"{name}.log"
    death = signal.SIGTERM if slurm else signal.SIGKILL
    try:
        environment = processes.child_environment({"PYTHONUNBUFFERED": "1", **where.extra})
        process = processes.spawn(argv, log, environment, death_signal=death)
    except OSError as error:
        raise GyreError(f"{name}: {argv[0]}: {error.strerror}", "check that it is installed and executable") from None
    return Child(name, process, log, marks)
