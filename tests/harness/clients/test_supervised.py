"""A real client as a run has it: the supervisor's process takes work from the gateway, runs the client in its box, scores, reports."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gyre_hpc.configfile import dump
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import VARIABLE, Runtime
from tests.executions.tasks import write_task
from tests.harness.clients.bench import SECRET, Bench, bench
from tests.harness.clients.install import PINS
from tests.harness.clients.script import Asked, call
from trees.records import Group, Role
from trees.store import StoreReader

pytestmark = pytest.mark.harness
TASK = "Write a.txt and b.txt"


def supervisor(made: Bench, folder: Path) -> subprocess.Popen[bytes]:
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    dump(made.config, paths.config)
    runtime = paths.runtime(1)
    runtime.mkdir(parents=True)
    where = Runtime(paths.root, 1, SECRET, made.address.url, made.address.socket).write(runtime)
    with open(folder / "supervisor.log", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "gyre_hpc.executions.supervisor", "--node", "n1"],
            env={**os.environ, VARIABLE: str(where)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def at_turn(number: int, asked: Asked) -> bool:
    return asked.text.count("<|im_start|>assistant") == number + 1


async def test_a_group_of_claude_code(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Two executions of one task at once, in their own workspaces: both scored by the task's verifier, each with its own tree."""
    async with bench(tmp_path, renderer, "claude-code") as made:
        write = [call("Bash", command=f"echo {text} > {name}.txt", description="Write") for name, text in (("a", "one"), ("b", "two"))]
        for turn in range(3):
            reply = [*write, "Both are there."][turn]
            made.script.on(f"turn-{turn}", partial(at_turn, turn), reply, reply)
        made.ledger.dispatch([Group(0, str(write_task(tmp_path / "task", instruction=TASK)), 2, 0, 0)])
        process = supervisor(made, tmp_path)
        try:
            async with asyncio.timeout(90):
                while made.ledger.counts()["finished"] < 2:
                    assert process.poll() is None, (tmp_path / "supervisor.log").read_text()
                    await asyncio.sleep(0.1)
            process.terminate()
            assert await asyncio.wait_for(asyncio.to_thread(process.wait), 20) == 0
        finally:
            process.kill()
            process.wait()
        log = (tmp_path / "supervisor.log").read_text()
        assert f"harness claude-code, version {PINS['claude-code'].version}" in log
        ends = StoreReader(tmp_path / "trees").ends()
        assert {n: (end.reason, end.score, end.valid, end.calls) for n, end in ends.items()} == dict.fromkeys(
            (0, 1), ("finished", 1.0, True, 3)
        ), log
        assert made.script.left == {}
        assert made.script.unexpected == []
        for execution in (0, 1):
            tree = made.tree(execution)
            assert [(c.role, c.difference) for c in tree.calls.values()] == [(Role.MAIN, "clean")] * 3
            assert len(tree.leaves) == 1
