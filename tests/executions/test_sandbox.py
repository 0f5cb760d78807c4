"""Boxes, with real bubblewrap: what is hidden, what is limited, and that nothing outlives them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.executions import sandbox
from gyre_hpc.executions.sandbox import Box, Exit, Limits, Mount


async def run(workspace: Path, script: str, timeout: float = 10.0, **box: object) -> tuple[Exit, str]:
    """Run a bash script in a box around `workspace`; how it ended and what it printed."""
    log = workspace.parent / "box.log"
    with open(log, "wb") as output:
        running = sandbox.start(sandbox.detect(), Box(workspace, **box), ["bash", "-c", script], output)  # type: ignore[arg-type]
        ended = await running.wait(timeout)
    return ended, log.read_text()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


def alive(marker: str) -> list[psutil.Process]:
    """Processes whose command line holds the marker."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if marker in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def test_exit_codes_and_signals(workspace: Path) -> None:
    assert (await run(workspace, "exit 7"))[0].code == 7
    assert (await run(workspace, "kill -9 $$"))[0].code == 128 + 9
    ended, _ = await run(workspace, "sleep 60", timeout=0.2)
    assert ended.timed_out
    assert ended.code is None
    assert ended.seconds < 5


async def test_a_box_that_cannot_be_made_is_not_an_exit_code(workspace: Path) -> None:
    ended, log = await run(workspace, "exit 0", mounts=(Mount(workspace / "missing", "/x"),))
    assert not ended.started
    assert ended.code is None
    assert "missing" in log


async def test_no_privileges_no_network_no_host(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    script = f"""
        grep -E '^Cap(Prm|Eff|Bnd)' /proc/self/status
        test -e {tmp_path}/secret && echo SEES HOST
        cat /etc/shadow 2>/dev/null && echo READS SHADOW
        touch /x /usr/x /dev/x /etc/x 2>/dev/null && echo WRITES SYSTEM
        unshare -U true 2>/dev/null && echo NESTS
        (echo > /dev/tcp/127.0.0.1/22) 2>/dev/null && echo CONNECTS
        grep -v lo: /proc/net/dev | grep : && echo HAS A NETWORK
        mknod dev c 1 3 2>/dev/null && echo MAKES DEVICES
        ln /etc/passwd linked 2>/dev/null && echo LINKS OUT
        ls /proc | grep -c '^[0-9]'
        echo "$HOME $PWD"; id -u; touch inside ~/x /tmp/y && echo fine
    """
    ended, log = await run(workspace, script)
    assert ended.code == 0, log
    lines = log.split("\n")
    assert [line.split()[1] for line in lines[:3]] == ["0" * 16] * 3
    assert int(lines[3]) < 10, "only the box's own processes are visible"
    assert lines[4:7] == ["/tmp/home /workspace", "1000", "fine"]
    assert (workspace / "inside").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("truncate -s 2M f; head -c 2000000 /dev/zero > f; test $(stat -c %s f) -le 1048576 && echo held", "held"),
        ("head -c 9000000 /dev/zero > /tmp/f || echo held", "held"),
        ("head -c 9000000 /dev/zero > /dev/shm/f || echo held", "held"),
        ("for i in $(seq 60); do sleep 5 & done 2>&1 | grep -q temporarily && echo held", "held"),
        (f"{sandbox.interpreter()} -I -S -c 'bytearray(900 << 20)' || echo held", "held"),
    ],
    ids=["file", "tmp", "shm", "processes", "memory"],
)
async def test_limits_hold(workspace: Path, script: str, said: str) -> None:
    limits = Limits(processes=20, memory=500 << 20, file=1 << 20, scratch=1 << 20, shared=1 << 20)
    _, log = await run(workspace, script, limits=limits)
    assert said in log.split("\n"), log


async def test_a_fork_bomb_and_children_in_other_sessions_end_with_the_box(workspace: Path) -> None:
    marker = f"987654.{os.getpid()}"
    ended, _ = await run(workspace, f"setsid -f sleep {marker}; (sleep {marker} & disown); exit 0")
    assert ended.code == 0
    assert alive(marker) == [], "dead when wait returns, not some time later"
    ended, _ = await run(workspace, "bomb() { bomb | bomb & }; bomb; sleep 60", timeout=0.5, limits=Limits(processes=40))
    assert ended.timed_out
    assert ended.seconds < 10


async def test_cancelling_the_wait_ends_the_box(workspace: Path) -> None:
    marker = f"976543.{os.getpid()}"
    task = asyncio.create_task(run(workspace, f"sleep {marker}"))
    while not alive(f"sleep {marker}"):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []


async def test_an_overlay_keeps_the_workspace_as_it_was(workspace: Path) -> None:
    (workspace / "kept").write_text("before")
    assert sandbox.detect().overlay
    ended, log = await run(workspace, "echo after > kept; rm -f kept; touch new; ls", overlay=True)
    assert (ended.code, log) == (0, "new\n")
    assert [path.name for path in workspace.iterdir()] == ["kept"]
    assert (workspace / "kept").read_text() == "before"


async def test_the_interpreter_works_inside_wherever_it_lives(workspace: Path) -> None:
    ended, log = await run(workspace, f"{sandbox.interpreter()} -I -S -c 'import sys, json; print(sys.version_info[:2])'")
    assert ended.code == 0, log
    assert log.strip() == str(sys.version_info[:2])


def test_a_box_dies_with_its_starter_even_by_kill_9(workspace: Path) -> None:
    marker = f"965432.{os.getpid()}"
    program = (
        "import asyncio, sys; from pathlib import Path; from gyre_hpc.executions import sandbox\n"
        "async def main():\n"
        f"    box = sandbox.Box(Path({str(workspace)!r}))\n"
        f"    r = sandbox.start(sandbox.detect(), box, ['bash', '-c', 'setsid -f sleep {marker}; sleep {marker}'], -3)\n"
        "    await r.wait(60)\n"
        "asyncio.run(main())\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program])
    wait_for(lambda: len([p for p in alive(f"sleep {marker}") if p.name() == "sleep"]) == 2)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_for(lambda: alive(marker) == [])


def wait_for(condition: object, deadline: float = 10.0) -> None:
    until = time.monotonic() + deadline
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "condition not met in time"
        time.sleep(0.02)


def test_what_is_enforced_is_recorded() -> None:
    enforced = sandbox.detect().enforced
    assert set(enforced) == {"processes", "memory", "file", "cpu", "files", "scratch"}
    assert enforced["memory"] == "rlimit"


def test_a_machine_without_namespaces_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sandbox, "bwrap_path", lambda: refusing)
    sandbox.detect.cache_clear()
    with pytest.raises(GyreError, match=r"No permissions to create new namespace; .*unprivileged_userns_clone"):
        sandbox.detect()
    sandbox.detect.cache_clear()
