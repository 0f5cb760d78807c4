"""A rank's end: with which status, and when it is given up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gyre_hpc.controller.main import _give_up, _host, _init_mpi
from gyre_hpc.errors import GyreError
from gyre_hpc.failure import first_failure
from gyre_hpc.runtime import Runtime
from tests.cells.ranks import run_ranks


def test_a_rank_that_is_given_up_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    _give_up(tmp_path, 3, "MPI to end", 600.0)
    failure = first_failure(tmp_path)
    assert failure is not None
    assert (left, failure.who, failure.exit_code) == ([75], "rank-00003", 75)
    assert failure.what.endswith("MPI to end: not there after 600 s")


@pytest.mark.parametrize(("gateway", "engine"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("n1", "here")])
def test_engines_listen_on_loopback_where_the_gateway_does(gateway: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert _host(Runtime(Path("run"), 1, "secret", f"http://{gateway}:8000", "gateway.sock")) == engine


def test_an_mpi_library_for_one_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(THREAD_SERIALIZED=2, COMM_WORLD="the world", Init_thread=lambda wanted: wanted - 1)
    monkeypatch.setitem(sys.modules, "mpi4py", cast(Any, SimpleNamespace(rc=SimpleNamespace(), MPI=mpi)))
    with pytest.raises(GyreError, match="one thread only"):
        _init_mpi(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["ready-mpi.3"], "it did not come through"
    mpi.Init_thread = lambda wanted: wanted
    assert _init_mpi(tmp_path, 3) == "the world"


def test_a_rank_leaves_with_its_status_and_with_what_it_printed() -> None:
    program = "from gyre_hpc.controller.main import _leave; print('said', end=''); _leave(75)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120.0, check=False)
    assert (ended.returncode, ended.stdout) == (75, "said")


@pytest.mark.job
def test_mpiexec_takes_no_rank_that_leaves_for_a_death(tmp_path: Path) -> None:
    """Ranks that left by os._exit after MPI_Finalize were a death for it four times in five, and the whole step ended with signal 9."""
    for _ in range(5):
        done = run_ranks("../controller/mpi_leave.py", 4, str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("leaves") == 4, done.stdout
