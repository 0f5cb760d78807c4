"""How a process of a run tells the driver why it dies: one small JSON file per process in the attempt's runtime folder.

Invariant: the driver prints one line for a stopped run. The first file (by time written) is the cause; later ones are what it dragged down,
and so is every error that comes out of the MPI library: it says that a peer is gone, never why.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.errors import ConfigError, ExitCode, GyreError, PeerLost, Resumable


@dataclass(frozen=True)
class Failure:
    """Who died of what; `t` seconds since the epoch on the node of that process. `consequence`: somebody else died before."""

    who: str
    what: str
    remedy: str
    exit_code: int
    t: float
    consequence: bool = False

    def error(self) -> GyreError:
        """The same as an exception for the command line, with the same exit code."""
        kinds: dict[int, type[GyreError]] = {ExitCode.RESUMABLE: Resumable, ExitCode.USAGE: ConfigError}
        return kinds.get(self.exit_code, GyreError)(f"{self.who}: {self.what}", self.remedy)


def as_failure(who: str, error: BaseException) -> Failure:
    """What the driver should hear of `error`: our own errors as they are, anything else as a resumable stop that names the log."""
    if isinstance(error, GyreError):
        return Failure(who, error.what, error.remedy, int(error.exit_code), time.time(), consequence=isinstance(error, PeerLost))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space in the run directory; the same command resumes"
        return Failure(who, f"disk full: {error.filename or error}", remedy, int(ExitCode.RESUMABLE), time.time())
    text = " ".join(str(error).split())[:300]
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it; at once the same rows would meet it again
        remedy = "training.activation_checkpointing = true or offload, or less training.tokens_per_microstep; then the same command goes on"
        return Failure(who, f"the device's memory is full: {text}", remedy, int(ExitCode.FAILED), time.time())
    what, remedy, code = f"{type(error).__name__}: {text}", "see its log; the same command resumes", int(ExitCode.RESUMABLE)
    return Failure(who, what, remedy, code, time.time(), consequence=type(error).__module__.startswith("mpi4py"))


def record_failure(folder: Path, failure: Failure) -> None:
    """Write the file; best effort, since the disk may be what failed (the exit code still tells)."""
    try:
        temporary = folder / f".failure-{failure.who}.{os.getpid()}"
        temporary.write_text(json.dumps(failure.__dict__))
        os.replace(temporary, folder / f"failure-{failure.who}.json")
    except OSError as error:
        print(f"{failure.who}: could not write the failure file: {error}", flush=True)


def first_failure(folder: Path) -> Failure | None:
    """The earliest recorded failure of this attempt; a consequence only where there is nothing else."""
    found = []
    for path in folder.glob("failure-*.json"):
        try:
            found.append(Failure(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return min(found, key=lambda failure: (failure.consequence, failure.t), default=None)
