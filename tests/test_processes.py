"""Children end with their parents, in whole groups, and see no launcher's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gyre_hpc import processes

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_X", "MPIR_CVAR_X", "SLURM_JOB_ID", "HYDI_CONTROL_FD", "HYDRA_X", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_KEY", "kept")
    env = processes.child_environment({"SLURM_CONF": "/x"})
    assert env["SLURM_CONF"] == "/x"
    assert env["MASTER_KEY"] == "kept"
    assert not [k for k in env if k.startswith(("PMI", "OMPI", "MPI", "HYD")) or k in ("SLURM_JOB_ID", "MASTER_PORT")]


def test_stop_reaches_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    program = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True); time.sleep(60)"
    child = processes.spawn([sys.executable, "-c", program], log)
    _until(lambda: log.exists() and "up" in log.read_text())
    grandchild = int(log.read_text().split()[0])
    assert processes.stop(child, 0.3) == -signal.SIGTERM
    _until(lambda: _gone(grandchild))
    assert processes.stop(child, 0.3) == -signal.SIGTERM


def test_child_dies_with_its_parent_but_not_with_the_thread_that_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import sys, threading, time; from pathlib import Path; from gyre_hpc import processes\n"
        f"t = threading.Thread(target=lambda: print(processes.spawn(['sleep', '60'], Path({str(log)!r})).pid, flush=True))\n"
        "t.start(); t.join(); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    assert not _gone(child)
    parent.kill()
    parent.wait()
    _until(lambda: _gone(child))


def test_marked_finds_orphans(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{threading.get_ident()}"
    child = processes.spawn(["sleep", "60"], tmp_path / "log", processes.child_environment({"GYRE_TEST_MARK": mark}))
    _until(lambda: [p.pid for p in processes.marked("GYRE_TEST_MARK", mark)] == [child.pid])
    assert processes.end_all(processes.marked("GYRE_TEST_MARK", mark), 1.0) == []
    assert child.wait() == -signal.SIGTERM


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("random", "trees"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    command = processes.python("gyre_hpc.executions.supervisor", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
