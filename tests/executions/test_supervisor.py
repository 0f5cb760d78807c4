"""A supervisor process with the real harness, real boxes and real verifiers, against a scripted gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from gyre_hpc.config import Config
from gyre_hpc.configfile import dump
from gyre_hpc.executions.program import SOCKET
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import VARIABLE, Runtime
from tests.executions.fake_gateway import Blocks, FakeGateway, bash, fake_gateway, text
from tests.executions.tasks import write_task

DONE = [text("Done.")]
HALF = "echo one > a.txt"


class Run:
    """A run directory with a configuration, and the supervisor that works for it."""

    def __init__(self, tmp_path: Path, fake: FakeGateway, sections: dict[str, Any], socket: Path) -> None:
        self.paths = RunPaths(tmp_path / "run")
        self.paths.root.mkdir()
        tree = {"run": {"dir": str(self.paths.root), "name": "t"}, "deadlines": {"start": 2.0}, **sections}
        dump(Config.model_validate(tree), self.paths.config)
        folder = self.paths.runtime(1)
        folder.mkdir(parents=True)
        self.runtime = Runtime(self.paths.root, 1, "sec", fake.url, str(socket)).write(folder)
        self.log = tmp_path / "supervisor.log"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gyre_hpc.executions.supervisor", "--node", "n1"],
                env={**os.environ, VARIABLE: str(self.runtime)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def of_this_run(self) -> list[int]:
        """Live processes that carry the run's mark, the supervisor itself included."""
        found = []
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(psutil.Error):
                if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(VARIABLE) == str(self.runtime):
                    found.append(process.pid)
        return found

    async def ended(self, deadline: float = 60.0) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), deadline)


@contextlib.asynccontextmanager
async def supervised(
    tmp_path: Path, script: Any, tasks: list[Path], relayed: bool = False, **harness: Any
) -> AsyncIterator[tuple[FakeGateway, Run]]:
    """`tasks[i]` is execution i, its secret `s<i>`."""
    work = [
        {
            "execution": n,
            "group": 0,
            "index": n,
            "attempt": 0,
            "task": str(task),
            "secret": f"s{n}",
            "seed": n,
            "retries_left": 1,
            "more": "kept",
        }
        for n, task in enumerate(tasks)
    ]
    quiet = {"compaction": 0.0, "sub_agent": 0.0, "retry": 0.0}
    async with fake_gateway(script, work) as fake:
        socket = tmp_path / "elsewhere.sock" if relayed else fake.socket
        run = Run(tmp_path, fake, {"harness": {**quiet, **harness}, "verifier": {"retries": 1}}, socket)
        try:
            yield fake, run
            run.process.terminate()
            assert await run.ended() == 0, run.log.read_text()
        finally:
            run.process.kill()
            run.process.wait()
            print(run.log.read_text())
    assert run.of_this_run() == []


def by_secret(fake: FakeGateway) -> str:
    """Which execution the last request came from."""
    return fake.seen[-1].path.split("/")[2]


@pytest.mark.job
async def test_every_ending(tmp_path: Path) -> None:
    """One supervisor, all endings at once: each is reported once, by its rule."""
    task = write_task(tmp_path / "task")
    broken = write_task(tmp_path / "broken", "exit 1")
    commands = {
        "s0": f"{HALF}; echo two > b.txt",
        "s1": f"{HALF}; sleep 60",
        "s2": f"{HALF}; kill -9 $PPID",
        "s5": HALF,
        "s7": f"cat /proc/$PPID/environ | tr '\\0' '\\n'; ls {tmp_path} 2>&1; ls {SOCKET} /run/gyre; cat given.txt",
        "s8": f"{HALF}; for i in 1 2 3; do head -c 900000 /dev/zero > big$i; done; sleep 60",
    }

    def script(body: dict[str, Any], call: int) -> Blocks | web.Response:
        who = by_secret(fake)
        if who == "s3":
            return web.Response(status=401, text="who?")
        if who == "s4":
            return [bash("true")]
        return [bash(commands[who])] if len(body["messages"]) == 1 else DONE

    tasks = [task, task, task, task, task, broken, tmp_path / "missing", task, task]
    async with supervised(tmp_path, script, tasks, timeout=8.0, max_turns=3, disk_mb=1) as (fake, run):
        await fake.until_reported(9)
        ends = {n: (end["reason"], end["score"], end["valid"]) for n, end in fake.ends.items()}
        assert ends == {
            0: ("finished", 1.0, True),
            1: ("timeout", 0.5, True),
            2: ("exit", 0.5, True),
            4: ("limit", 0.0, True),
            5: ("verifier", 0.0, False),
            7: ("finished", 0.0, True),
            8: ("limit", 0.5, True),
        }
        assert {n: loss["reason"] for n, loss in fake.losses} == {3: "fault", 6: "sandbox"}
        assert "401" in dict(fake.losses)[3]["detail"]
        assert "missing" in dict(fake.losses)[6]["detail"]
        assert "no reward" in fake.ends[5]["detail"]
        assert fake.ends[8]["seconds"] < 7.9, "stopped for its size, before its time was over"
        knows = next(seen for seen in fake.seen if "/s7/" in seen.path and len(seen.body["messages"]) == 3).body["messages"][2]
        told = knows["content"][0]["content"]
        assert "ANTHROPIC_BASE_URL=http://gateway/x/s7" in told
        assert "cannot access" in told
        assert told.endswith("given")
        assert VARIABLE not in told
        assert str(run.paths.root) not in told
        async with asyncio.timeout(60):
            while any(run.paths.workspaces.iterdir()):
                await asyncio.sleep(0.02)


async def test_an_overall_timeout_leaves_training(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    async with supervised(tmp_path, lambda b, c: [bash("sleep 60")], [task], timeout=60.0, overall_timeout=1.0) as (fake, _):
        await fake.until_reported(1)
    assert (fake.ends[0]["reason"], fake.ends[0]["valid"]) == ("overall-timeout", False)


async def test_a_program_that_prints_without_end_is_stopped(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    printing = {"kind": "command", "argv": ["bash", "-c", f"{HALF}; yes | head -c 3000000; sleep 60"]}
    async with supervised(tmp_path, lambda b, c: DONE, [task], timeout=30.0, disk_mb=1, **printing) as (fake, _):
        await fake.until_reported(1)
    assert (fake.ends[0]["reason"], fake.ends[0]["score"], fake.ends[0]["valid"]) == ("limit", 0.5, True)


async def test_through_a_relay_with_more_work_than_slots(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    script = lambda body, call: [bash(HALF)] if len(body["messages"]) == 1 else DONE  # noqa: E731
    async with supervised(tmp_path, script, [task] * 12, relayed=True, slots_per_node=3, starts_at_once=2, keep_workspaces=True) as (
        fake,
        run,
    ):
        await fake.until_reported(12)
    assert {end["score"] for end in fake.ends.values()} == {0.5}
    assert len(fake.ends) == 12
    assert "gyre-relay-" in run.log.read_text()
    assert sorted(path.name for path in run.paths.workspaces.iterdir()) == sorted(f"001-{n}" for n in range(12))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nothing_is_left_when_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    marker = f"{os.getpid()}.{int(number)}"
    task = write_task(tmp_path / "task")
    async with fake_gateway(lambda b, c: [bash(f"setsid -f sleep 5{marker}; sleep 5{marker}")]) as fake:
        fake.work = [
            {"execution": n, "group": 0, "index": n, "attempt": 0, "task": str(task), "secret": f"s{n}", "seed": n, "retries_left": 1}
            for n in range(3)
        ]
        run = Run(tmp_path, fake, {"harness": {"sub_agent": 0.0, "retry": 0.0}}, fake.socket)
        await until(lambda: len(sleeping(marker)) == 6)
        run.process.send_signal(number)
        assert await run.ended() == (0 if number == signal.SIGTERM else -9)
        await until(lambda: not sleeping(marker) and not run.of_this_run())
        assert fake.ends == {}, "what was running is the ledger's to give out again"


@pytest.mark.job
async def test_a_gateway_that_stays_away_stops_it_resumable_with_one_line(tmp_path: Path) -> None:
    async with fake_gateway(lambda b, c: DONE) as fake:
        run = Run(tmp_path, fake, {}, fake.socket)
        await until(lambda: "slots" in run.log.read_text())
    assert await run.ended() == 75
    assert "out of reach for 2 s" in run.log.read_text().splitlines()[-1]
    assert (run.paths.runtime(1) / "failure-supervisor-n1.json").exists()


def sleeping(marker: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["name", "cmdline"]) if p.info["name"] == "sleep" and f"5{marker}" in (p.info["cmdline"] or [])]


async def until(condition: Any, deadline: float = 60.0) -> None:
    async with asyncio.timeout(deadline):
        while not condition():
            await asyncio.sleep(0.05)
