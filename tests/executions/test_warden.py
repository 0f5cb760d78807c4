"""What is left of boxes whose supervisor is killed while they are being made: real bubblewrap, a real SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre_hpc.executions import warden

ROOT = Path(__file__).parents[2]
STARTER = """
import asyncio, os, signal, sys, time
from pathlib import Path
from gyre_hpc.executions import sandbox, warden

async def main():
    host = sandbox.detect()
    with warden.guard():
        for _ in range(12):
            sandbox.start(host, sandbox.Box(Path(sys.argv[1])), ["sleep", "600"], sys.stdout.fileno())
        time.sleep(float(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def boxes(workspace: Path) -> list[psutil.Process]:
    """Processes of bwrap around the workspace, both halves, and none that is dead."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if line and line[0].endswith("bwrap") and str(workspace) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize("after", ["0", "0.01", "0.03"])
def test_boxes_that_are_being_made_end_with_their_supervisor(tmp_path: Path, after: str) -> None:
    done = subprocess.run([sys.executable, "-c", STARTER, str(tmp_path), after], cwd=ROOT, timeout=60, check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    end = time.monotonic() + 30
    while left := boxes(tmp_path):
        assert time.monotonic() < end, [process.status() for process in left]
        time.sleep(0.05)


def test_an_orderly_end_kills_nobody_and_leaves_no_warden() -> None:
    with warden.guard():
        other = subprocess.Popen(["sleep", "60"])
        mark = os.environ[warden.MARK]
        assert warden.marked(mark) == [other.pid]
    assert warden.MARK not in os.environ
    assert other.poll() is None
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    other.kill()
    other.wait()


def test_only_what_carries_the_mark_is_killed() -> None:
    marked = subprocess.Popen(["sleep", "60"], env={warden.MARK: "one"})
    other = subprocess.Popen(["sleep", "60"], env={warden.MARK: "one-more"})
    try:
        assert warden.end("one") == 1
        assert marked.wait(10) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
