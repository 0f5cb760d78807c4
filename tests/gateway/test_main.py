"""The gateway as a process: what survives kill -9, how it stops, and what it says when the disk is full."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gyre_hpc.configfile import check, dump
from gyre_hpc.engines.frames import MEDIA, frame
from gyre_hpc.engines.protocol import TokenChunk
from gyre_hpc.events import EventLog
from gyre_hpc.failure import first_failure
from gyre_hpc.gateway.main import main, socket_folder
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import SECRET_VARIABLE, Address, read_address
from gyre_hpc.stopfile import ask, wished
from tests.gateway.fakes import tool_call
from trees.records import Fate
from trees.stats import differences
from trees.store import StoreReader, StoreWriter

SECRET = "run-secret"


class EngineServer:
    """Fake torch engine: answers `POST /generate` in that engine's wire form with prepared texts. `gate` closed: waits after one chunk."""

    def __init__(self, renderer: TurnRenderer) -> None:
        self.renderer = renderer
        self.replies: list[str] = []
        self.said: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.prompts.append((await request.json())["prompt"])
        reply = self.replies.pop(0) if self.replies else "done"
        tokens = [*self.renderer.tokenizer.encode(reply, add_special_tokens=False).ids, self.renderer.turn_end]
        self.said.append(tokens)
        response = web.StreamResponse(headers={"Content-Type": MEDIA})
        await response.prepare(request)
        for part, finish in ((tokens[:2], None), (tokens[2:], "stop")):
            await response.write(frame(TokenChunk(part, [-0.5] * len(part), [4] * len(part), finish)))
            await self.gate.wait()
        return response


@pytest.fixture
async def engine(renderer: TurnRenderer) -> AsyncIterator[EngineServer]:
    made = EngineServer(renderer)
    app = web.Application()
    app.add_routes([web.post("/generate", made.generate)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield made
    made.gate.set()
    await runner.cleanup()


@dataclass
class Running:
    """A gateway process and a client of it."""

    paths: RunPaths
    process: asyncio.subprocess.Process
    address: Address
    http: aiohttp.ClientSession
    attempt: int

    async def control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with self.http.post(f"{self.address.url}/control/{path}", json=body or {}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def begin(self, engine: EngineServer | None = None, group: int = 0) -> str:
        """Dispatch a group of two, take it, open the route; the harness URL of its first execution."""
        await self.control("groups", {"groups": [{"group": group, "task": "t", "size": 2, "version": 0, "burst": 0}]})
        work = await self.control("work", {"node": "n", "slots": 2, "wait": 1})
        if engine is not None:
            address = {"kind": "torch", "url": engine.url, "capacity": 8, "window": 900}  # type: ignore[attr-defined]
            await self.control("routes", {"cell": 0, "address": address})
            await self.control("routes/0/open")
        return f"{self.address.url}/x/{work[0]['secret']}/v1/messages"

    def end(self) -> None:
        """As the driver does it: there is no time left, and SIGTERM."""
        ask(self.paths.runtime(self.attempt), 0.0)
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float = 60.0) -> tuple[int, str]:
        """(exit code, stderr) once the process is gone."""
        _, errors = await asyncio.wait_for(self.process.communicate(), seconds)
        return self.process.returncode or 0, errors.decode()


@asynccontextmanager
async def gateway(root: Path, attempt: int = 1) -> AsyncIterator[Running]:
    """Start it on a run directory that has a config.yaml; killed at the end if it still runs."""
    paths = RunPaths(root)
    command = [sys.executable, "-m", "gyre_hpc.gateway.main", "--run-dir", str(root), "--attempt", str(attempt)]
    environment = {**os.environ, SECRET_VARIABLE: SECRET}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(120):
                while (address := read_address(paths.runtime(attempt))) is None:
                    assert process.returncode is None, (await process.communicate())[1].decode()
                    await asyncio.sleep(0.02)
            yield Running(paths, process, address, http, attempt)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    dump(check({"run": {"name": "t"}, "model": {"path": str(model)}, "gateway": {"ping": 0.2}}, "test"), path / "config.yaml")
    return path


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "stream": True, "messages": [{"role": "user", "content": "go"}], **fields}


@pytest.mark.job
async def test_kill_9_after_the_last_event_loses_nothing_and_the_next_attempt_goes_on(root: Path, engine: EngineServer) -> None:
    engine.replies.append("Look. " + tool_call("bash", command="ls"))
    async with gateway(root) as running:
        url = await running.begin(engine)
        async with running.http.post(url, json=body()) as answer:
            async for line in answer.content:
                if b"message_stop" in line:
                    running.process.kill()
                    break
        await running.process.wait()
        tree = StoreReader(running.paths.trees).tree(0)
        call = next(iter(tree.calls.values()))
        assert call.fate is Fate.DELIVERED
        assert tree.tokens_of([call.sampled]).tolist() == engine.said[0]
        assert tree.tokens_of(tree.path(call.prompt)).tolist() == engine.prompts[0]
    async with gateway(root, 2) as running:
        ledger = await running.control("ledger")
        assert [(g["group"], g["live"], g["ends"]) for g in ledger["groups"]] == [(0, [], [])]
        work = await running.control("work", {"node": "n", "slots": 9, "wait": 1})
        assert [(item["index"], item["attempt"]) for item in work] == [(0, 1), (1, 1)]
        assert {item["execution"] for item in work}.isdisjoint({0, 1})
        for item in work:
            await running.control(f"executions/{item['execution']}/lost", {"reason": "test"})
        running.end()
        assert (await running.ended())[0] == 0


async def test_a_fork_that_nothing_explains_is_an_event(root: Path, engine: EngineServer) -> None:
    engine.replies.append(tool_call("bash", command="ls"))
    async with gateway(root) as running:
        url = await running.begin(engine)
        async with running.http.post(url, json=body(stream=False)) as answer:
            (used,) = (await answer.json())["content"]
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": "a"}
        for given in (used["input"], {"raw": "ls"}):
            turns = [{"role": "assistant", "content": [{**used, "input": given}]}, {"role": "user", "content": [result]}]
            async with running.http.post(url, json=body(stream=False, messages=[*body()["messages"], *turns])) as answer:
                assert answer.status == 200
        running.end()
        assert (await running.ended())[0] == 0
    events = [json.loads(line) for line in running.paths.events.read_text().splitlines()]
    (fork,) = [event for event in events if event["kind"].startswith("warning")]
    assert (fork["kind"], fork["execution"], fork["difference"], fork["messages"]) == ("warning.fork", 0, "drift", 0)
    rows = differences(running.paths.trees)
    assert [(row["calls"], row["clean"], row["drift"]) for row in rows] == [(3, 2, 1), (0, 0, 0)]


async def test_sigterm_is_passed_on_and_at_the_end_of_its_time_it_breaks_calls_visibly_seals_and_leaves_nothing(
    root: Path, engine: EngineServer
) -> None:
    async with gateway(root) as running:
        url = await running.begin(engine)
        async with running.http.post(url, json=body(stream=False)) as answer:
            assert (await answer.json())["stop_reason"] == "end_turn"
        end = await running.control("executions/0/end", {"reason": "finished", "score": 0.5, "valid": True, "seconds": 1})
        assert end == {"accepted": True, "calls": 1, "tokens": 5}
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            while not wished(running.paths.runtime(1)):
                await asyncio.sleep(0.01)
        ask(running.paths.runtime(1), 1000.0)
        await running.control("groups", {"groups": [{"group": 1, "task": "t", "size": 1, "version": 0, "burst": 0}]})
        work = await running.control("work", {"node": "n", "slots": 1, "wait": 1})
        engine.gate.clear()
        answer = await running.http.post(f"{running.address.url}/x/{work[0]['secret']}/v1/messages", json=body())
        await answer.content.readany()
        ask(running.paths.runtime(1), 0.0)
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await answer.read()
        code, errors = await running.ended()
        assert code == 0, errors
        assert not Path(running.address.socket).parent.exists()
    assert [path.name for path in running.paths.trees.glob("*.h5")] == ["segment-000001.h5"]
    events = [json.loads(line) for line in running.paths.events.read_text().splitlines()]
    assert [(e["kind"], e["score"], e["tokens"]) for e in events if e["kind"] == "execution.end"] == [("execution.end", 0.5, 5)]
    reader = StoreReader(running.paths.trees)
    last = next(iter(reader.tree(work[0]["execution"]).calls.values()))
    assert last.fate is Fate.CANCELLED


async def test_a_full_disk_fails_calls_and_stops_with_one_line(root: Path, engine: EngineServer) -> None:
    """The file size limit of the process stands for the full disk: the next write of the journal fails with OSError."""
    async with gateway(root) as running:
        url = await running.begin(engine)
        (journal,) = running.paths.trees.glob("journal-*")
        limit = len(journal.read_bytes().rstrip(b"\0"))  # behind it lies the room that is written ahead
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        async with running.http.post(url, json=body()) as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["type"] == "api_error"
        code, errors = await running.ended()
        assert code == 75
        assert errors.strip().splitlines()[-1].startswith("gateway: the run's record can't be written: File too large")
        failure = first_failure(running.paths.runtime(1))
        assert failure is not None
        assert "make room" in failure.remedy
        assert engine.prompts == []
    assert sorted(StoreReader(running.paths.trees).executions()) == [0, 1]


async def test_a_call_is_held_until_a_route_opens_and_the_unix_socket_serves_too(root: Path, engine: EngineServer) -> None:
    async with gateway(root) as running:
        url = await running.begin()
        connector = aiohttp.UnixConnector(running.address.socket)
        async with aiohttp.ClientSession(connector=connector) as boxed:
            path = url.removeprefix(running.address.url)
            async with boxed.post(f"http://gateway{path}", json=body()) as answer:
                waited = b""
                async with asyncio.timeout(120):
                    while waited.count(b"event: ping") < 2:
                        waited += await answer.content.readany()
                assert b"message_start" in waited
                assert engine.prompts == []
                await running.control("routes", {"cell": 0, "address": {"kind": "torch", "url": engine.url, "capacity": 1, "window": 900}})  # type: ignore[attr-defined]
                await running.control("routes/0/open")
                rest = await answer.read()
        assert b"message_stop" in rest
        assert len(running.address.socket) < 100


@pytest.mark.parametrize(
    ("change", "secret", "code", "line"),
    [
        ({"model": {"path": "/nowhere"}}, SECRET, 2, "model.path = /nowhere does not exist"),
        ({}, "", 1, "GYRE_SECRET is not set"),
    ],
)
def test_what_can_not_start_says_so_in_one_line(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    secret: str,
    code: int,
    line: str,
) -> None:
    dump(check({"run": {"name": "t"}, **change}, "test"), root / "config.yaml")
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    assert main(["--run-dir", str(root), "--attempt", "1"]) == code
    assert line in capsys.readouterr().err.strip().splitlines()[-1]
    failure = first_failure(RunPaths(root).runtime(1))
    assert failure is not None
    assert failure.exit_code == code


def test_trees_that_were_taken_away_stop_the_run_in_place_of_ids_that_are_given_twice(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for execution in (3, 4):
        EventLog(root / "events.jsonl").emit("execution.end", execution=execution)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert main(["--run-dir", str(root), "--attempt", "1"]) == 1
    assert "trees lacks 2 executions that events.jsonl tells of, the first is 3; restore" in capsys.readouterr().err


def test_a_damaged_journal_is_no_reason_to_try_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreWriter(root / "trees"):
        pass
    (journal,) = (root / "trees").glob("journal-*")
    journal.write_bytes(b"x" * 100)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert main(["--run-dir", str(root), "--attempt", "1"]) == 1
    assert "has no header; restore this file from a copy" in capsys.readouterr().err


def test_socket_folder_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_folder(tmp_path) as first, socket_folder(tmp_path) as second:
        assert not first.exists()
        assert second.exists()
        assert len(str(second)) < 90
    assert not second.exists()
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 100)
    with socket_folder(tmp_path) as short:
        assert str(short).startswith("/tmp/gyre-")
