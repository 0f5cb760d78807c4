"""`gyre gateway` as a process before a fake token endpoint: official SDKs as harnesses, a trainer's API, kill -9, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import yaml

from gyre_hpc.configfile import load
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.errors import ConfigError
from gyre_hpc.events import read_events
from gyre_hpc.gateway.standalone import run_gateway
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.status import collect, render
from tests.gateway.endpoint import Endpoint, endpoint, logprob
from tests.gateway.fakes import tool_call
from trees.records import Fate, Group
from trees.store import StoreReader, StoreWriter

pytestmark = pytest.mark.job
BASH: Any = {"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
GO: list[dict[str, Any]] = [{"role": "user", "content": "go"}]


@pytest.fixture
async def server(renderer: TurnRenderer) -> AsyncIterator[Endpoint]:
    async with endpoint(renderer) as made:
        yield made


@pytest.fixture
def config(tmp_path: Path, model: Path, server: Endpoint) -> Path:
    path = tmp_path / "record.yaml"
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model), "window": 2000},
        "gateway": {"ping": 0.2},
        "upstream": {"urls": [server.url]},
        "deadlines": {"start": 5.0},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


@dataclass
class Running:
    """A gateway process and the trainer's side of it."""

    paths: RunPaths
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession
    address: dict[str, Any] = field(default_factory=dict)

    async def api(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
        headers = {"Authorization": f"Bearer {self.address['secret']}"}
        method = "GET" if body is None else "POST"
        async with self.http.request(method, f"{self.address['url']}{path}", json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def ended(self) -> tuple[int, str, str]:
        out, err = await asyncio.wait_for(self.process.communicate(), 60)
        return self.process.returncode or 0, out.decode(), err.decode()

    async def stop(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "gyre_hpc.cli", "gateway", str(config), *more]


@asynccontextmanager
async def gateway(config: Path, *more: str, run: Path | None = None, **environment: str) -> AsyncIterator[Running]:
    paths = RunPaths(run or config.parent / "run")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(config, *more), stdout=pipe, stderr=pipe, env={**os.environ, **environment})
    try:
        async with aiohttp.ClientSession() as http:
            running = Running(paths, process, http)
            async with asyncio.timeout(120):
                while not running.address or running.address["pid"] != process.pid:
                    assert process.returncode is None, (await process.communicate())[1].decode()
                    await asyncio.sleep(0.02)
                    running.address = json.loads(paths.gateway.read_text()) if paths.gateway.exists() else {}
            yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def who(running: Running) -> str:
    return f"{socket.gethostname()} pid {running.process.pid}"


async def refused(config: Path, *more: str) -> tuple[int, str]:
    """(exit code, the one line) of a gateway that does not start."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(config, *more), stdout=pipe, stderr=pipe)
    _, err = await asyncio.wait_for(process.communicate(), 120)
    lines = err.decode().strip().splitlines()
    assert len(lines) == 1, lines
    return process.returncode or 0, lines[0]


async def test_all_dialects_are_recorded_and_a_trainer_reads_what_was_sampled(config: Path, server: Endpoint) -> None:
    server.replies += ["Look. " + tool_call("bash", command="ls"), "from chat", "from responses"]
    server.key = "sesame"
    async with gateway(config, "upstream.key_variable=THEIR_KEY", THEIR_KEY="sesame") as running:
        assert stat.S_IMODE(running.paths.gateway.stat().st_mode) == stat.S_IMODE(running.paths.gateway_state.stat().st_mode) == 0o600
        await running.api("/api/version", {"version": 7})
        made = await running.api("/api/groups", {"task": "t1", "size": 3, "group": 4, "harness": "claude-code", "instruction": "do it"})
        assert (
            await running.api("/api/groups", {"task": "t1", "size": 3, "group": 4, "harness": "claude-code", "instruction": "do it"})
            == made
        )
        first, second, third = made["executions"]
        assert first["launch"]["env"]["ANTHROPIC_BASE_URL"] == first["anthropic_base_url"]
        claude = anthropic.AsyncAnthropic(base_url=first["anthropic_base_url"], api_key="none", max_retries=0)
        gpt = openai.AsyncOpenAI(base_url=f"{running.address['url']}/v1", api_key=second["secret"], max_retries=0)
        responses = openai.AsyncOpenAI(base_url=third["openai_base_url"], api_key="none", max_retries=0)
        async with claude.messages.stream(model="m", max_tokens=300, messages=GO, tools=[BASH]) as stream:  # type: ignore[arg-type]
            message = await stream.get_final_message()
        assert message.stop_reason == "tool_use"
        chat = await gpt.chat.completions.create(model="m", messages=GO)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "from chat"
        assert (await responses.responses.create(model="m", input="go")).output_text == "from responses"
        for n, item in enumerate(made["executions"]):
            end = await running.api(f"/api/executions/{item['execution']}/end", {"score": n / 2})
            assert (end["accepted"], end["valid"], end["calls"], end["tokens"]) == (True, True, 1, len(server.said[n]))
        with pytest.raises(openai.APIStatusError) as caught:
            await gpt.chat.completions.create(model="m", messages=GO)  # type: ignore[arg-type]
        assert caught.value.status_code == 410
        told = await running.api(f"/api/executions/{first['execution']}/tree")
        sampled = next(node for node in told["nodes"] if node["kind"] == "sampled")
        assert sampled["tokens"] == server.said[0]
        assert sampled["versions"] == [7] * len(sampled["tokens"])
        assert sampled["logprobs"] == [logprob(token) for token in sampled["tokens"]]
        assert [row["score"] for row in await running.api("/api/executions?state=ended")] == [0.0, 0.5, 1.0]
        assert (await running.api(f"/api/executions/{third['execution']}"))["reason"] == "finished"
        assert (await running.api("/api/status"))["finished"] == 3
        assert "running, recording alone, attempt 1" in render(collect(running.paths))
        code, out, _ = await running.stop()
    assert code == 0
    assert "executions: 3 finished" in render(collect(running.paths))
    assert f"gateway at {running.address['url']} before {server.url}" in out
    assert not running.paths.gateway.exists()
    assert [path.name for path in running.paths.trees.glob("*.h5")] == ["segment-000001.h5"]
    with StoreReader(running.paths.trees) as reader:
        for n, body in enumerate(server.asked):
            tree = reader.tree(n)
            (call,) = tree.calls.values()
            assert tree.tokens_of(tree.path(call.prompt)).tolist() == body["prompt"]
            assert tree.tokens_of([call.sampled]).tolist() == server.said[n]
    knobs = {key: server.asked[0][key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")}
    assert knobs == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    events = list(read_events(running.paths.events))
    assert [event["kind"] for event in events] == ["run.start", *["execution.end"] * 3, "run.end"]
    for path in (path for path in running.paths.root.rglob("*") if path.is_file()):
        assert b"sesame" not in path.read_bytes(), path


async def test_kill_9_in_mid_call_and_the_same_command_goes_on(config: Path, server: Endpoint) -> None:
    server.replies += ["Look. " + tool_call("bash", command="ls"), "never to be seen", "yes", "the end"]
    async with gateway(config) as running:
        (item,) = (await running.api("/api/groups", {"task": "t"}))["executions"]
        url, port = f"/x/{item['secret']}/v1/messages", int(running.address["url"].rsplit(":", 1)[1])
        body: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": GO, "tools": [BASH]}
        async with running.http.post(running.address["url"] + url, json=body) as answer:
            first = await answer.json()
        result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "a b"}
        turns = [*GO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        server.gate.clear()
        async with running.http.post(running.address["url"] + url, json={**body, "stream": True, "messages": turns}) as answer:
            seen = b""
            while b"nev" not in seen:
                seen += await answer.content.readany()
            running.process.kill()
            await running.process.wait()
        server.gate.set()
    async with gateway(config, f"gateway.port={port}") as running:
        assert running.address["url"].endswith(f":{port}")
        assert (await running.api("/api/executions"))[0]["execution"] == item["execution"]
        async with running.http.post(running.address["url"] + url, json=body) as answer:
            assert await answer.json() == first
        async with running.http.post(running.address["url"] + url, json={**body, "stream": True, "messages": turns}) as answer:
            assert b"yes" in await answer.read()
        turns = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        async with running.http.post(running.address["url"] + url, json={**body, "messages": turns}) as answer:
            assert (await answer.json())["content"][0]["text"] == "the end"
        tree = StoreReader(running.paths.trees).tree(item["execution"])
        calls = list(tree.calls.values())
        assert [(call.fate, call.difference) for call in calls] == [
            (Fate.DELIVERED, "clean"),
            (None, ""),
            (Fate.DELIVERED, "retry"),
            (Fate.DELIVERED, "clean"),
        ]
        assert tree.incomplete
        assert len(tree.leaves) == 1
        assert tree.tokens_of(tree.path(calls[-1].prompt)).tolist() == server.asked[-1]["prompt"]
        await running.api(f"/api/executions/{item['execution']}/end", {"score": 1.0})
        code, out, _ = await running.stop()
        assert code == 0
        assert "1 executions go on; 1 of their calls were lost with the last gateway" in out
    assert len(list(running.paths.trees.glob("*.h5"))) == 1
    log = "".join(path.read_text() for path in running.paths.logs.rglob("*.log"))
    assert "listening on" in log
    for secret in (item["secret"], item["secret"].partition("-")[2], running.address["secret"]):
        assert secret not in log + "".join(map(str, read_events(running.paths.events)))


async def test_a_trainer_pauses_for_new_weights_and_calls_go_on_with_their_tokens(config: Path, server: Endpoint) -> None:
    """And the server's own word on its version is heard, and a second gateway on the directory refused."""
    server.replies += ["abcdefgh", "xyz"]
    async with gateway(config, "upstream.version_path=/weight_info", "upstream.poll=0.05") as running:
        async with asyncio.timeout(60):
            while (await running.api("/api/status"))["version"] != 5:
                await asyncio.sleep(0.02)
        server.version = "default"
        await asyncio.sleep(0.2)
        assert await refused(config) == (
            75,
            f"gyre: {running.paths.root} is being run by {who(running)}; wait for it or stop it; `gyre status` shows how far it is",
        )
        (item,) = (await running.api("/api/groups", {"task": "t"}))["executions"]
        server.gate.clear()
        body = {"model": "m", "max_tokens": 200, "stream": True, "messages": GO}
        async with running.http.post(f"{item['anthropic_base_url']}/v1/messages", json=body) as answer:
            text = b""
            while b"abc" not in text:
                text += await answer.content.readany()
            paused = await running.api("/api/pause", {"deadline": 5})
            assert paused["held"] == 1
            assert (await running.api("/api/status"))["paused"]
            server.gate.set()
            assert (await running.api("/api/resume", {"version": 3}))["version"] == 3
            await answer.read()
        tree = StoreReader(running.paths.trees).tree(item["execution"])
        (call,) = tree.calls.values()
        assert tree.columns is not None
        (span,) = tree.column_slices([call.sampled])
        assert tree.columns.tokens[span].tolist() == [*server.said[0][:3], *server.said[1]]
        assert tree.columns.versions[span].tolist() == [5] * 3 + [3] * len(server.said[1])
        assert server.asked[1]["prompt"] == server.asked[0]["prompt"] + server.said[0][:3]
    log = (running.paths.attempt_logs(1) / "gateway.log").read_text()
    assert log.count("does not tell a number as weight_version") == 1


async def test_the_example_of_the_documentation(config: Path, server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "gateway.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    async with gateway(config, f"run.dir={config.parent / 'runs/record'}", run=config.parent / "runs/record") as running:
        monkeypatch.chdir(config.parent)
        code = await asyncio.create_subprocess_exec(sys.executable, "-c", example, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(code.communicate(), 120)
        assert code.returncode == 0
        assert out.decode().count("ANTHROPIC_BASE_URL") == out.decode().count("0 tokens to train on") == 4
        status = await running.api("/api/status")
        assert (status["finished"], status["version"]) == (4, 1)


async def test_a_call_outlives_the_server_that_it_began_on(config: Path, server: Endpoint, renderer: TurnRenderer) -> None:
    async with endpoint(renderer) as second:
        server.replies, second.replies = ["abcdefgh", "xyz"], ["abcdefgh", "xyz"]
        server.gate.clear()
        second.gate.clear()
        async with gateway(config, f"upstream.urls=['{server.url}','{second.url}']") as running:
            (item,) = (await running.api("/api/groups", {"task": "t"}))["executions"]
            claude = anthropic.AsyncAnthropic(base_url=item["anthropic_base_url"], api_key="none", max_retries=0)
            asking = asyncio.create_task(claude.messages.create(model="m", max_tokens=50, messages=GO))  # type: ignore[arg-type]
            async with asyncio.timeout(60):
                while (await running.api("/api/status"))["tokens"] < 3:
                    await asyncio.sleep(0.02)
            began, other = (server, second) if server.said else (second, server)
            other.replies.pop(0)
            began.broken = True
            began.gate.set()
            other.gate.set()
            message = await asyncio.wait_for(asking, 60)
            assert message.content[0].text == "abcxyz"  # type: ignore[union-attr]
            assert other.asked[0]["prompt"] == began.asked[0]["prompt"] + began.said[0][:3]
            assert (await running.stop())[0] == 0
        (call,) = StoreReader(running.paths.trees).tree(0).calls.values()
        assert call.fate is Fate.DELIVERED


async def test_a_full_disk_ends_it_with_one_line_and_the_same_command_goes_on(config: Path, server: Endpoint) -> None:
    """The file size limit of the process stands for the full disk."""
    async with gateway(config) as running:
        (item,) = (await running.api("/api/groups", {"task": "t"}))["executions"]
        (journal,) = running.paths.trees.glob("journal-*")
        limit = len(journal.read_bytes().rstrip(b"\0"))
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        body = {"model": "m", "max_tokens": 50, "messages": GO}
        async with running.http.post(f"{item['anthropic_base_url']}/v1/messages", json=body) as answer:
            assert answer.status == 500
        code, _, err = await running.ended()
        assert code == 75
        assert err.strip().splitlines()[-1].startswith("gyre: gateway: the run's record can't be written: File too large")
        assert server.asked == []
    async with gateway(config) as running:
        assert [row["execution"] for row in await running.api("/api/executions")] == [item["execution"]]


async def test_a_port_that_is_taken_and_a_disk_without_room_are_one_line(config: Path, server: Endpoint) -> None:
    taken = server.url.split(":")[2].split("/")[0]
    for override, code, line in (
        (f"gateway.port={taken}", 1, f"gyre: gateway: gateway.host = 127.0.0.1, gateway.port = {taken}:"),
        ("run.min_free_mb=1000000000000", 75, f"gyre: {config.parent / 'run'}: "),
    ):
        process = await asyncio.create_subprocess_exec(*command(config, override), stderr=asyncio.subprocess.PIPE)
        _, err = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, len(err.decode().splitlines())) == (code, 1), err.decode()
        assert err.decode().startswith(line)


async def test_a_signal_ends_the_wait_for_a_server(config: Path) -> None:
    more = ("upstream.urls=['http://127.0.0.1:9/v1']", "deadlines.start=600")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(config, *more), stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    told = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert told.strip() == "waiting for http://127.0.0.1:9/v1, up to 600 s each (deadlines.start); Ctrl-C ends it"
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 75
    assert "gyre: gateway: stopped before the servers answered; the same command goes on" in err.decode()


async def test_by_hand_without_any_api(config: Path, server: Endpoint) -> None:
    server.replies += ["hello"]
    async with gateway(config, "--key", "mine", "--harness", "codex") as running:
        first = await running.api("/api/executions")
        assert [row["task"] for row in first] == ["mine"]
        written = next(running.paths.runtime(1).glob("home-0/.codex/config.toml"))
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        running.process.kill()
        await running.process.wait()
    async with gateway(config, "--key", "mine") as running:
        assert [row["execution"] for row in await running.api("/api/executions")] == [0]
        running.process.send_signal(signal.SIGINT)
        code, out, _ = await running.ended()
    assert code == 0
    exported = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines() if line.startswith("export "))
    assert exported["ANTHROPIC_BASE_URL"].startswith(f"{running.address['url']}/x/0-")
    assert exported["OPENAI_BASE_URL"] == exported["ANTHROPIC_BASE_URL"] + "/v1"
    end = StoreReader(running.paths.trees).ends()[0]
    assert (end.reason, end.valid) == ("finished", False)
    assert not running.paths.runtime(2).exists()


async def test_strangers_and_mistakes_at_the_api(config: Path) -> None:
    async with gateway(config) as running:
        async with running.http.get(f"{running.address['url']}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {running.address['secret']}\u00e9"}):
            async with running.http.get(f"{running.address['url']}/api/status", headers=headers) as answer:
                assert answer.status == 401
        (mine, other) = (await running.api("/api/groups", {"task": "t", "size": 2, "group": 0}))["executions"]
        async with running.http.get(
            f"{running.address['url']}/api/status", headers={"Authorization": f"Bearer {mine['secret']}"}
        ) as answer:
            assert answer.status == 401
        swapped = f"{mine['execution']}-{other['secret'].partition('-')[2]}"
        for secret in (running.address["secret"], f"{mine['execution']}-{running.address['secret']}", swapped):
            async with running.http.get(f"{running.address['url']}/x/{secret}/v1/models") as answer:
                assert (answer.status, answer.headers["x-should-retry"]) == (401, "false")
        await running.api("/api/groups", {"task": ""}, 400)
        await running.api("/api/groups", {"task": "t", "sise": 3}, 400)
        assert "claude-code" in (await running.api("/api/groups", {"task": "t", "harness": "x"}, 400))["error"]
        await running.api("/api/groups", {"task": "t", "group": 1})
        await running.api("/api/groups", {"task": "other", "group": 1}, 409)
        await running.api("/api/executions/99", None, 404)
        await running.api("/api/executions/99/tree", None, 404)
        await running.api("/api/executions/99/end", {}, 404)
        await running.api("/api/executions?state=dead", None, 400)
        end = await running.api("/api/executions/0/end", {"score": 1.0})
        assert (end["valid"], end["calls"]) == (False, 0)
        assert not (await running.api("/api/executions/0/end", {"score": 0.0}))["accepted"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("upstream.urls=[]", "upstream.urls is empty; give the servers"),
        ("upstream.urls=[localhost:8000]", "give http:// or https:// URLs"),
        ("upstream.urls=['http://me:secret@host/v1']", "upstream.urls holds a password"),
        ("rollout.top_p=0.9", "rollout.top_p = 0.9; servers give log-probs after the cut"),
        ("upstream.key_variable=THEIR_KEY", "THEIR_KEY, and that variable is not set; export THEIR_KEY="),
    ],
)
def test_mistakes_of_the_configuration_are_one_line(tmp_path: Path, override: str, line: str) -> None:
    path = tmp_path / "record.yaml"
    path.write_text("upstream: {urls: ['http://127.0.0.1:9/v1']}")
    with pytest.raises(ConfigError) as caught:
        run_gateway(load(path, [override]))
    assert line in caught.value.line
    assert "me:secret" not in caught.value.line


def test_a_run_has_engines_of_its_own_and_keeps_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "record.yaml"
    path.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nupstream: {{urls: ['http://127.0.0.1:9/v1']}}")
    with pytest.raises(ConfigError, match="record with `gyre gateway`"):
        prepare(load(path))
    prepare(load(path), alone=True)
    with StoreWriter(tmp_path / "run" / "trees") as store:
        store.append(Group(0, "t", 1, 0, 0))
    with pytest.raises(ConfigError, match="was made by `gyre gateway`"):
        prepare(load(path, ["upstream.urls=[]"]))
    prepare(load(path), alone=True)
