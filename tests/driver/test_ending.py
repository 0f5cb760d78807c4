"""The stop: nobody is killed before it could put its things away, not even when somebody hurries."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from gyre_hpc.driver import ending
from gyre_hpc.driver.ending import stop_all
from gyre_hpc.driver.launcher import Child, LocalLauncher

TIDY = """
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.3)
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


def test_a_hurried_stop_leaves_a_moment_to_tidy_up_and_then_kills(tmp_path: Path) -> None:
    tidy, stubborn = child(tmp_path, "tidy"), child(tmp_path, "stubborn")
    begun = time.monotonic()
    left = stop_all([tidy, stubborn], LocalLauncher(), tmp_path, 30.0, "GYRE_TEST_MARK", lambda: True)
    assert time.monotonic() - begun < ending.LEAVE
    assert left == []
    assert (tidy.process.returncode, stubborn.process.returncode) == (0, -9)
    assert not (tmp_path / "tidy").exists()
