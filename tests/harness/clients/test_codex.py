"""Codex, as it comes from npm, in a box against the gateway: each scenario ends with its task done and the tree that it must leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients import scenarios
from tests.harness.clients.scenarios import Client, asks, says
from tests.harness.clients.script import Reply, call
from trees.records import Fate, Role

pytestmark = pytest.mark.harness
CODEX = Client("codex", lambda command: call("exec_command", cmd=command))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SUMMARY = "The numbers go to out.txt, one a turn."


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.many_tool_turns,
        scenarios.thoughts_in_tool_turns,
        scenarios.parallel_calls,
        scenarios.engine_resets_in_mid_stream,
        scenarios.no_engine_for_a_while,
        scenarios.overload,
        scenarios.roles_are_transferred_in_mid_stream,
    ],
)
async def test_scenario(tmp_path: Path, renderer: TurnRenderer, scenario: scenarios.Scenario) -> None:
    async with CODEX.bench(tmp_path, renderer) as made:
        await scenario(CODEX, made)


async def test_a_call_that_breaks_for_good(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with CODEX.bench(tmp_path, renderer, faults=0) as made:
        await scenarios.a_call_that_breaks_for_good(CODEX, made)


async def test_sub_agents(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Two at once, with ids of their own; the main conversation waits for both."""
    async with CODEX.bench(tmp_path, renderer) as made:
        for name in ("one", "two"):
            replies: list[Reply | str] = [Reply(CODEX.shell(f"echo {name} > {name}.txt"), pause=0.02), f"Part {name} is done."]
            made.script.on(name, says(f"[sub-{name}]"), *replies)
        spawn = "\n".join(call("multi_agent_v1.spawn_agent", message=f"Do it. [sub-{name}]") for name in ("one", "two"))
        wait = call("exec_command", cmd="for i in $(seq 100); do [ -e one.txt ] && [ -e two.txt ] && break; sleep 0.1; done")
        ran = await CODEX.done(made, spawn, wait, CODEX.add("main"))
        assert [ran.file(f"{name}.txt").strip() for name in ("one", "two")] == ["one", "two"]
        made.exact(ran, ("clean", "sub-agent"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["one"], roles["two"]) == ({Role.MAIN}, [Role.SUB_AGENT] * 2, [Role.SUB_AGENT] * 2)


async def test_compaction(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It asks for a summary without its tools, then begins anew with it."""
    async with CODEX.bench(tmp_path, renderer, {"model": {"window": 70_000}}) as made:
        made.script.on("summary", asks("CONTEXT CHECKPOINT COMPACTION"), *[SUMMARY] * 4, spare=4)
        ran = await CODEX.done(made, *(CODEX.shell(f"echo {i} >> out.txt; head -c 9000 /dev/zero | tr '\\0' {i}") for i in range(6)))
        assert ran.file("out.txt").split() == [str(i) for i in range(6)]
        tree = made.exact(ran, ("clean", "compaction"))
        roles = made.roles(ran)
        assert set(roles["main"]) == {Role.MAIN}
        assert set(roles["summary"]) == {Role.MAIN_SUMMARY}
        assert [c.difference for c in tree.calls.values()].count("compaction") == 2 * len(roles["summary"])
        assert max(prompt + sampled for prompt, sampled in made.usage(ran)) <= 70_000


async def test_malformed_arguments(tmp_path: Path, renderer: TurnRenderer) -> None:
    """No JSON (delivered as the text it is, beside a call that is one), the wrong keys, the wrong types, a tool that is not there."""
    broken = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo bad >> out.txt", "descr\n</tool_call>\n'
    async with CODEX.bench(tmp_path, renderer) as made:
        odd = [call("exec_command", command="echo bad"), call("exec_command", cmd=7), call("nothing", x=1.0)]
        ran = await CODEX.done(made, broken + CODEX.add(1), *odd, CODEX.add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)


@pytest.mark.parametrize("nothing", ["<think>What now?</think>", ""], ids=["thinking-only", "empty"])
async def test_an_answer_without_anything_ends_the_task(tmp_path: Path, renderer: TurnRenderer, nothing: str) -> None:
    async with CODEX.bench(tmp_path, renderer) as made:
        made.script.on("main", says("[task-1]"), CODEX.add(1), nothing)
        ran = await made.run(scenarios.TASK)
        assert (ran.code, ran.file("out.txt").split()) == (0, ["1"])
        made.exact(ran)
        assert made.roles(ran)["main"] == [Role.MAIN] * 2


async def test_images_that_a_tool_shows(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It sends what it looks at as an image; the policy is told that there was one."""
    async with CODEX.bench(tmp_path, renderer) as made:
        ran = await CODEX.done(made, CODEX.shell(f"echo {PIXEL} | base64 -d > a.png"), call("view_image", path="a.png"), CODEX.add(1))
        assert ran.file("out.txt").split() == ["1"]
        made.exact(ran)
        assert "[input_image left out: this model reads text only]" in made.script.of("main")[2].asked.last


@pytest.mark.parametrize("cut", ["A text that is cut he", CODEX.add("bad")[:60]], ids=["text", "call"])
async def test_a_max_tokens_stop_ends_it(tmp_path: Path, renderer: TurnRenderer, cut: str) -> None:
    """It names no limit, so only a full window stops a call; it takes an incomplete response for an error, and asks no more."""
    async with CODEX.bench(tmp_path, renderer) as made:
        made.script.on("main", says("[task-1]"), CODEX.add(1), Reply(cut, cut=True))
        ran = await made.run(scenarios.TASK)
        assert (ran.code, ran.file("out.txt").split()) == (1, ["1"])
        assert "max_output_tokens" in ran.output
        made.exact(ran)
        assert [(c.fate, c.finish) for c in made.calls(ran)] == [(Fate.DELIVERED, "stop"), (Fate.DELIVERED, "length")]
        assert len(made.requests) == 2


async def test_the_cap_of_calls_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A refusal that repeating does not change: it stops at once and says why."""
    async with CODEX.bench(tmp_path, renderer, {"gateway": {"max_calls": 2}}) as made:
        made.script.on("main", says("[task-1]"), *map(CODEX.add, range(2)))
        ran = await made.run(scenarios.TASK)
        assert ran.code == 1
        assert "all it may make" in ran.output
        made.exact(ran)
        assert len(made.requests) == 3
