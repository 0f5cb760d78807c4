"""Why a process died: the earliest file is the cause."""

from __future__ import annotations

import errno
from pathlib import Path

import torch

from gyre_hpc.errors import ConfigError, ExitCode, GyreError, Resumable
from gyre_hpc.failure import Failure, as_failure, first_failure, record_failure


def test_the_first_failure_is_the_cause_and_garbage_is_passed_over(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, Failure("rank-00002", "dragged down", "", 75, 20.0))
    record_failure(tmp_path, Failure("gateway", "disk full", "free space", 75, 10.0))
    (tmp_path / "failure-torn.json").write_text('{"who": "x"')
    found = first_failure(tmp_path)
    assert found is not None
    error = found.error()
    assert isinstance(error, Resumable)
    assert error.line == "gateway: disk full; free space"


def test_what_is_said_of_an_exception() -> None:
    ours = as_failure("a", ConfigError("key x", "say y"))
    assert (ours.what, ours.remedy, ours.exit_code) == ("key x", "say y", ExitCode.USAGE)
    assert isinstance(ours.error(), ConfigError)
    assert as_failure("a", OSError(errno.ENOSPC, "No space left on device", "f")).what == "disk full: f"
    other = as_failure("a", ValueError("two\nlines"))
    assert (other.what, other.exit_code) == ("ValueError: two lines", ExitCode.RESUMABLE)
    assert as_failure("a", GyreError("x")).exit_code == ExitCode.FAILED
    full = as_failure("a", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    assert (full.what, full.exit_code) == ("the device's memory is full: CUDA out of memory. Tried to allocate 2 GiB.", ExitCode.FAILED)
    assert "training.activation_checkpointing" in full.remedy


def test_an_error_of_the_mpi_library_is_a_consequence_and_never_hides_a_cause(tmp_path: Path) -> None:
    broken = type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})("Other MPI error")
    record_failure(tmp_path, as_failure("controller", broken))
    found = first_failure(tmp_path)
    assert found is not None
    assert found.consequence
    record_failure(tmp_path, as_failure("rank-00001", ConfigError("no such model", "name another")))
    found = first_failure(tmp_path)
    assert found is not None
    assert found.who == "rank-00001"
