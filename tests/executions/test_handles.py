"""Handles on processes, with pidfds and on kernels without."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from pathlib import Path

import pytest

from gyre_hpc.executions import sandbox
from gyre_hpc.executions.handles import ProcessHandle
from gyre_hpc.harness import tools


@pytest.fixture(params=["pidfd", "old kernel"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "old kernel":
        monkeypatch.setattr(os, "pidfd_open", refuse)


async def test_kill_then_dead() -> None:
    process = subprocess.Popen(["sleep", "60"])
    handle = ProcessHandle(process.pid)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.dead(), 0.05)
    handle.kill()
    await asyncio.wait_for(handle.dead(), 5)
    assert process.wait() == -9
    handle.kill()


async def test_one_that_is_gone_already() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    handle = ProcessHandle(process.pid)
    handle.kill()
    await asyncio.wait_for(handle.dead(), 5)


async def test_boxes_and_tools_work_either_way(tmp_path: Path) -> None:
    box = sandbox.Box(tmp_path)
    running = sandbox.start(sandbox.detect(), box, ["bash", "-c", "setsid -f sleep 60; exit 3"], subprocess.DEVNULL)
    assert (await running.wait(10)).code == 3
    assert (await sandbox.start(sandbox.detect(), box, ["sleep", "60"], subprocess.DEVNULL).wait(0.1)).timed_out
    assert tools.bash("echo said; exit 4", 100, 5.0) == ("said\n", 4)
    assert tools.bash("sleep 60", 100, 0.1)[1] == 124
