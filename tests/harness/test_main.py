"""The bundled harness as a process, against a scripted gateway: what it sends, what it does, how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_hpc import harness
from gyre_hpc.executions.sandbox import interpreter
from gyre_hpc.harness import texts
from gyre_hpc.harness.main import pause
from tests.executions.fake_gateway import Blocks, Cut, FakeGateway, bash, fake_gateway, text, use

MAIN = Path(harness.__file__).parent / "main.py"
DONE = [text("Done.")]


@dataclass
class Ran:
    code: int
    error: str


async def run(fake: FakeGateway, cwd: Path, instruction: str = "Do it", tcp: bool = False, **settings: Any) -> Ran:
    """Run the harness to its end in `cwd`."""
    env = {
        "PATH": "/usr/bin:/bin",
        "ANTHROPIC_BASE_URL": "http://gateway/x/s3cret",
        "ANTHROPIC_MODEL": "m",
        "GYRE_HARNESS": json.dumps(settings),
    }
    if tcp:
        env["ANTHROPIC_BASE_URL"] = f"{fake.url}/x/s3cret"
    else:
        env["GYRE_GATEWAY_SOCKET"] = str(fake.socket)
    process = await asyncio.create_subprocess_exec(
        interpreter(), "-I", "-S", str(MAIN), instruction, cwd=cwd, env=env, stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return Ran(process.returncode, error.decode())


def scripted(*answers: Blocks) -> Any:
    return lambda body, call: answers[min(call, len(answers) - 1)]


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
async def test_works_until_the_model_calls_no_tool(tmp_path: Path, tcp: bool) -> None:
    write = use("write_file", 2, path="sub/b.txt", content="two\n")
    async with fake_gateway(scripted([text("1."), bash("echo one > a.txt; echo said")], [write, bash("exit 3", 3)], DONE)) as fake:
        ran = await run(fake, tmp_path, "Write\nfiles", tcp=tcp)
    assert ran.code == 0, ran.error
    assert (tmp_path / "a.txt").read_text() == "one\n"
    assert (tmp_path / "sub/b.txt").read_text() == "two\n"
    first, _, third = (seen.body for seen in fake.seen)
    assert first["messages"] == [{"role": "user", "content": "Write\nfiles"}]
    assert first["tools"] == texts.TOOLS
    assert first["system"] == [{"type": "text", "text": texts.SYSTEM}]
    assert first["stream"] is True
    assert third["messages"][1]["content"] == [text("1."), bash("echo one > a.txt; echo said")]
    assert third["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "said"}]
    failed = {"type": "tool_result", "tool_use_id": "toolu_3", "content": texts.tool_result("", 3), "is_error": True}
    assert third["messages"][4]["content"] == [{"type": "tool_result", "tool_use_id": "toolu_2", "content": texts.NO_OUTPUT}, failed]
    assert {seen.path for seen in fake.seen} == {"/x/s3cret/v1/messages"}
    assert len({seen.headers["x-claude-code-session-id"] for seen in fake.seen}) == 1
    assert not any("x-claude-code-agent-id" in seen.headers for seen in fake.seen)


async def test_history_is_append_only_between_compactions(tmp_path: Path) -> None:
    async with fake_gateway(scripted([bash("echo 1", 1)], [bash("echo 2", 2)], [bash("echo 3", 3)], DONE)) as fake:
        assert (await run(fake, tmp_path)).code == 0
    histories = [seen.body["messages"] for seen in fake.seen]
    for before, after in itertools.pairwise(histories):
        assert after[: len(before)] == before
        assert len(after) == len(before) + 2


async def test_arguments_come_back_reserialised_and_broken_ones_wrapped(tmp_path: Path) -> None:
    spaced = {**bash("true"), "raw": '{ "command":"true",  "n": 1.50 }'}
    broken = {**bash("", 2), "raw": '{"command": tru'}
    async with fake_gateway(scripted([spaced, broken], DONE)) as fake:
        assert (await run(fake, tmp_path)).code == 0
    kept = fake.seen[1].body["messages"][1]["content"]
    assert [block["input"] for block in kept] == [{"command": "true", "n": 1.5}, {"raw": '{"command": tru'}]
    assert b'"command":"true",  ' not in fake.seen[1].raw
    assert fake.seen[1].body["messages"][2]["content"][1]["is_error"] is True


async def test_sub_agent_holds_a_conversation_of_its_own_first(tmp_path: Path) -> None:
    def script(body: dict[str, Any], call: int) -> Blocks:
        return [[bash("echo sub > s.txt")], [text("Did it.")], DONE][call]

    async with fake_gateway(script) as fake:
        assert (await run(fake, tmp_path, "1. one\n2. two", sub_agent=1.0)).code == 0
    assert (tmp_path / "s.txt").exists()
    sub, again, main = fake.seen
    assert sub.body["system"][0]["text"] == texts.SUB_AGENT_SYSTEM
    assert sub.body["messages"] == [{"role": "user", "content": texts.sub_agent_prompt("2. two")}]
    assert sub.headers["x-claude-code-agent-id"] == again.headers["x-claude-code-agent-id"]
    assert "x-claude-code-agent-id" not in main.headers
    assert main.headers["x-claude-code-session-id"] == sub.headers["x-claude-code-session-id"]
    assert main.body["messages"] == [{"role": "user", "content": texts.delegated_prompt("1. one", "Did it.")}]


async def test_compaction_appends_to_the_last_user_message_then_starts_over(tmp_path: Path) -> None:
    async with fake_gateway(scripted([bash("echo 1")], [text("Step 1.")], DONE)) as fake:
        assert (await run(fake, tmp_path, "1. one", compaction=1.0)).code == 0
    work, asked, fresh = (seen.body for seen in fake.seen)
    assert asked["messages"][:-1] == [*work["messages"], {"role": "assistant", "content": [bash("echo 1")]}]
    assert asked["messages"][-1]["content"][-1] == text(texts.COMPACT)
    assert asked["messages"][-1]["content"][0]["type"] == "tool_result"
    assert asked["tools"] == work["tools"]
    assert fresh["messages"] == [{"role": "user", "content": texts.compacted_prompt("1. one", "Step 1.")}]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_dropped_call_is_repeated_byte_for_byte(tmp_path: Path, seed: int) -> None:
    async with fake_gateway(lambda body, call: [bash("echo x >> a.txt")] if len(body["messages"]) == 1 else DONE) as fake:
        assert (await run(fake, tmp_path, retry=1.0, seed=seed)).code == 0
    raws = [seen.raw for seen in fake.seen]
    assert [raws.count(raw) for raw in dict.fromkeys(raws)] == [2, 2]
    assert raws[0] == raws[1]
    assert (tmp_path / "a.txt").read_text() == "x\n", "only the repeated answer was acted on"


@pytest.mark.parametrize("clean", [True, False], ids=["clean-eof", "closed"])
async def test_a_stream_that_ends_early_is_repeated_never_taken(tmp_path: Path, clean: bool) -> None:
    def script(body: dict[str, Any], call: int) -> Blocks | Cut:
        return Cut([text("Done, "), bash("true")], 6, clean) if call == 0 else DONE

    async with fake_gateway(script) as fake:
        assert (await run(fake, tmp_path)).code == 0
    assert len(fake.seen) == 2
    assert fake.seen[0].raw == fake.seen[1].raw


async def test_server_errors_are_repeated_after_what_the_server_asks(tmp_path: Path) -> None:
    def script(body: dict[str, Any], call: int) -> Blocks | web.Response:
        return web.Response(status=529, text="busy", headers={"retry-after": "0"}) if call < 3 else DONE

    async with fake_gateway(script) as fake:
        assert (await run(fake, tmp_path)).code == 0
    assert len({seen.raw for seen in fake.seen}) == 1
    assert len(fake.seen) == 4


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [(401, "who?", 5), (400, '{"error": {"message": "prompt is too long: 9 > 8"}}', 4), (400, "malformed", 5)],
)
async def test_refusals_end_it(tmp_path: Path, status: int, body: str, code: int) -> None:
    async with fake_gateway(lambda b, c: web.Response(status=status, text=body)) as fake:
        ran = await run(fake, tmp_path)
    assert ran.code == code
    assert len(fake.seen) == 1
    assert str(status) in ran.error


async def test_turn_and_output_limits_have_their_exit_codes(tmp_path: Path) -> None:
    async with fake_gateway(scripted([bash("true")])) as fake:
        assert (await run(fake, tmp_path, max_turns=3)).code == 3
        assert len(fake.seen) == 3
    async with fake_gateway(scripted([text("and so on")])) as fake:
        fake.stop_reason = "max_tokens"
        assert (await run(fake, tmp_path)).code == 4


async def test_same_seed_same_requests(tmp_path: Path) -> None:
    async def shape(seed: int) -> list[bytes]:
        async with fake_gateway(lambda body, call: [bash("true")] if len(body["messages"]) < 4 else DONE) as fake:
            await run(fake, tmp_path, "1. a\n2. b", seed=seed, sub_agent=0.5, compaction=0.5, retry=0.5)
        return [json.dumps(seen.body["messages"]).encode() for seen in fake.seen]

    assert await shape(5) == await shape(5)
    assert len({tuple(await shape(seed)) for seed in range(4)}) > 1


def test_usage_is_an_exit_code_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(MAIN)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_start_up_imports_nothing_dear() -> None:
    """Each of these costs as much as the interpreter itself, thousands of times per run."""
    done = subprocess.run([sys.executable, "-I", "-S", "-X", "importtime", str(MAIN)], capture_output=True, text=True, check=False)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "json" in imported
    assert not imported & {
        "typing",
        "socket",
        "subprocess",
        "http.client",
        "ssl",
        "email",
        "urllib.request",
        "dataclasses",
        "argparse",
        "random",
    }


@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_the_pause_of_a_tool_has_its_mean_and_a_long_tail(spread: float) -> None:
    draw = random.Random(1).random
    pauses = sorted(pause(2.0, spread, draw(), draw()) for _ in range(20000))
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.05)
    assert pauses[-200] > 4 * pauses[10000]  # the slowest hundredth against the median
