"""The stop: nobody is killed before it could put its things away, not even when somebody hurries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_hpc.driver import ending
from gyre_hpc.driver.ending import end_one, stop_all, verdict
from gyre_hpc.driver.launcher import Child, LocalLauncher
from gyre_hpc.failure import Failure, record_failure
from gyre_hpc.stopfile import StopFile

TIDY = """
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.1)
    pathlib.Path(sys.argv[1]).unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave if sys.argv[2] == "tidy" else signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(1)
"""


def child(tmp_path: Path, name: str) -> Child:
    process = subprocess.Popen([sys.executable, "-c", TIDY, str(tmp_path / name), name], start_new_session=True)
    while not (tmp_path / name).exists():
        time.sleep(0.02)
    return Child(name, process, tmp_path / "log", 1)


def test_a_hurried_stop_leaves_a_moment_to_tidy_up_and_then_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "HURRIED", 2.0)  # where cores are crowded as well
    monkeypatch.setattr(ending, "LEAVE", 60.0)
    tidy, stubborn = child(tmp_path, "tidy"), child(tmp_path, "stubborn")
    begun = time.monotonic()
    left = stop_all([tidy, stubborn], LocalLauncher(), tmp_path, 30.0, "GYRE_TEST_MARK", lambda: True)
    assert time.monotonic() - begun < ending.LEAVE
    assert left == []
    assert (tidy.process.returncode, stubborn.process.returncode) == (0, -9)
    assert StopFile(tmp_path).left() <= 0.0, "whoever passes SIGTERM on must know that it is meant now"
    assert not (tmp_path / "tidy").exists()


def ended(tmp_path: Path, status: int, log: str) -> Child:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait()
    (tmp_path / "mpi.log").write_text(log)
    return Child("mpi", process, tmp_path / "mpi.log", 4)


SRUN = """srun: error: n3: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.4
0: mpi4py.MPI.Exception: Other MPI error, error stack:
srun: error: n1: task 0: Exited with exit code 1
srun: error: n2: task 1: Killed
"""


def test_the_rank_that_srun_names_first_is_to_blame_not_the_one_whose_connection_broke(tmp_path: Path) -> None:
    record_failure(tmp_path, Failure("controller", "Exception: Other MPI error", "", 75, 1.0, consequence=True))
    said = verdict(ended(tmp_path, 1, SRUN), tmp_path)
    assert said.what == f"rank 2 (a cell) was killed by SIGKILL; log: {tmp_path}/mpi.log"


def test_what_a_rank_says_itself_counts_more_than_a_broken_connection_that_was_told_before(tmp_path: Path) -> None:
    record_failure(tmp_path, Failure("controller", "Exception: Other MPI error", "", 75, 1.0, consequence=True))
    record_failure(tmp_path, Failure("rank-00001", "no such model", "name another", 2, 2.0))
    assert verdict(ended(tmp_path, 1, SRUN), tmp_path).what == "rank-00001: no such model"


def test_a_broken_connection_is_told_where_nothing_else_is_known(tmp_path: Path) -> None:
    record_failure(tmp_path, Failure("controller", "Exception: Other MPI error", "", 75, 1.0, consequence=True))
    assert verdict(ended(tmp_path, 1, ""), tmp_path).what == "controller: Exception: Other MPI error"


def marked(tmp_path: Path, name: str) -> subprocess.Popen[bytes]:
    """A process of the attempt on this node."""
    environment = {**os.environ, "GYRE_TEST_MARK": str(tmp_path)}
    environment.pop("SLURMD_NODENAME", None)
    process = subprocess.Popen([sys.executable, "-c", TIDY, str(tmp_path / name), "tidy"], env=environment, start_new_session=True)
    while not (tmp_path / name).exists():
        time.sleep(0.02)
    return process


def test_the_end_of_one_child_spares_who_has_its_pid_on_another_node(tmp_path: Path) -> None:
    here = os.uname().nodename.split(".")[0]
    gateway, orphan = marked(tmp_path, "gateway"), marked(tmp_path, "orphan")
    for rank, (node, process) in enumerate([("another", gateway), (here, orphan)]):
        note = {"pid": process.pid, "node": node, "rank": rank}
        (tmp_path / f"started-supervisor-n1.{rank}.json").write_text(json.dumps(note))
    client = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    try:
        end_one(Child("supervisor-n1", client, tmp_path / "log", 2), LocalLauncher(), tmp_path, "GYRE_TEST_MARK")
        assert orphan.wait(60.0) == 0
        assert gateway.poll() is None
    finally:
        gateway.kill()
        gateway.wait()
