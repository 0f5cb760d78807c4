"""Claude Code, as it comes from npm, in a box against the gateway: each scenario ends with its task done and the tree that it must leave.

`stable`: with the settings by which it changes as little as it can of what it sent (the default), and as it comes.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.gateway.template import TurnRenderer
from tests.harness.clients.bench import FAULTS, Bench, Ran, bench
from tests.harness.clients.script import Asked, Reply, call
from trees.records import Fate, Role

pytestmark = pytest.mark.harness
TASK = "Do what the tools tell you. [task-1]"
BOTH = pytest.mark.parametrize("stable", [True, False], ids=["stable", "plain"])
WINDOW = 120_000
"""Tokens (bytes, with this tokenizer): a first prompt has about 80,000; it compacts when less than some 20,000 are left."""


def claude(
    folder: Path, renderer: TurnRenderer, stable: bool, tree: dict[str, dict[str, Any]] | None = None, faults: int = FAULTS
) -> AbstractAsyncContextManager[Bench]:
    sections = dict(tree or {})
    sections["harness"] = {**sections.get("harness", {}), "stable": stable}
    return bench(folder, renderer, "claude-code", sections, faults)


def bash(command: str) -> str:
    return call("Bash", command=command, description="Go on")


def add(text: object) -> str:
    """A tool call that adds a line to the file by which the task is judged."""
    return bash(f"echo {text} >> out.txt")


async def done(made: Bench, *replies: Reply | str) -> Ran:
    """Run the task with these replies in the main conversation, then "All done.": it ends well, and all was asked for."""
    made.script.on("main", "[task-1]", *replies, "All done.")
    ran = await made.run(TASK)
    assert ran.code == 0, ran.output
    assert ran.output.strip().endswith("All done."), ran.output
    return ran


@BOTH
async def test_many_tool_turns(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Twenty turns, clean; the client probes with HEAD when it runs as it comes; usage in its answers is the truth."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, *(f"Step {i}.\n" + add(i) for i in range(20)))
        assert ran.file("out.txt").split() == [str(i) for i in range(20)]
        tree = made.exact(ran)
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
        assert len(tree.leaves) == 1
        probes = [seen.path for seen in made.requests if seen.method == "HEAD"]
        assert all(path.endswith("/api/hello") for path in probes)
        assert stable or probes


@BOTH
async def test_sub_agent(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """In the foreground, and in the background: there the main conversation goes on after its end when the sub-agent's news come."""
    async with claude(tmp_path, renderer, stable) as made:
        made.script.on("sub", "[sub-1]", add("sub"), "The part is done.")
        task = call("Agent", description="Part", prompt="Do the part. [sub-1]", subagent_type="general-purpose")
        ran = await done(made, task, *([add("main")] if stable else ["I wait.", add("main")]))
        assert ran.file("out.txt").split() == ["sub", "main"]
        made.exact(ran, ("clean", "sub-agent"))
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
        assert made.roles(ran)["sub"] == [Role.SUB_AGENT] * 2


@BOTH
async def test_parallel_sub_agents(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Two at once, their calls in flight together with each other's; each is a conversation of its own from its first call on."""
    async with claude(tmp_path, renderer, stable) as made:
        for name in ("one", "two"):
            made.script.on(name, f"[sub-{name}]", Reply(bash(f"echo {name} > {name}.txt"), pause=0.02), f"Part {name} is done.")
        tasks = [
            call("Agent", description="Part", prompt=f"Do it. [sub-{name}]", subagent_type="general-purpose") for name in ("one", "two")
        ]
        made.script.on("main", "[task-1]", "\n".join(tasks), "Both work.", "All done.", "All done.", spare=2)
        ran = await made.run(TASK)
        assert ran.code == 0, ran.output
        assert [ran.file(f"{name}.txt").strip() for name in ("one", "two")] == ["one", "two"]
        tree = made.exact(ran, ("clean", "sub-agent"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["one"], roles["two"]) == ({Role.MAIN}, [Role.SUB_AGENT] * 2, [Role.SUB_AGENT] * 2)
        assert [c.difference for c in tree.calls.values()].count("sub-agent") == 2


def summary(asked: Asked) -> bool:
    return "Your task is to create a detailed summary" in asked.last


SUMMARY = "<analysis>I look back.</analysis>\n<summary>The numbers go to out.txt, one a turn. [task-1]</summary>"


def wordy(text: str) -> str:
    """Adds a line and fills the window by 9,000 tokens."""
    return bash(f"echo {text} >> out.txt; head -c 9000 /dev/zero | tr '\\0' {text}")


@BOTH
async def test_compaction(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """It summarises before its window is full, by the usage that the gateway reports, and goes on from the summary."""
    async with claude(tmp_path, renderer, stable, {"model": {"window": WINDOW}}) as made:
        made.script.on("summary", summary, *[SUMMARY] * 8, spare=8)
        ran = await done(made, *map(wordy, "abcdefghi"))
        assert "".join(ran.file("out.txt").split()) == "abcdefghi"
        tree = made.exact(ran, ("clean", "compaction"))
        roles = made.roles(ran)
        assert set(roles["main"]) == {Role.MAIN}
        assert roles["summary"] == [Role.MAIN_SUMMARY] * len(roles["summary"])
        assert roles["summary"]
        assert [c.difference for c in tree.calls.values()].count("compaction") == len(roles["summary"])
        assert max(prompt + sampled for prompt, sampled in made.usage(ran)) <= WINDOW


async def test_a_prompt_over_the_window(tmp_path: Path, renderer: TurnRenderer) -> None:
    """One result that leaves no room: the refusal is worded so that the client shortens and summarises instead of giving up."""
    async with claude(tmp_path, renderer, True, {"model": {"window": 105_000}}) as made:
        made.script.on("summary", summary, SUMMARY)
        ran = await done(made, bash("echo 1 >> out.txt; head -c 29000 /dev/zero | tr '\\0' a"), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "compaction"))
        assert made.roles(ran) == {"main": [Role.MAIN] * 3, "summary": [Role.MAIN_SUMMARY]}


async def test_a_groups_executions_share_their_prompt(tmp_path: Path, renderer: TurnRenderer) -> None:
    """What two executions of a task are told first is stored once: nothing in it tells them apart."""
    async with claude(tmp_path, renderer, True) as made:
        made.script.on("main", "[task-1]", "One.", "Two.")
        trees = [made.tree((await made.run(TASK)).execution) for _ in range(2)]
        prompts = [tree.path(next(iter(tree.calls.values())).prompt) for tree in trees]
        assert prompts[0] == prompts[1]
        assert [tree.path_length(path[-1]) > 50_000 for tree, path in zip(trees, prompts, strict=True)] == [True, True]


async def test_compaction_of_a_sub_agent(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with claude(tmp_path, renderer, True, {"model": {"window": WINDOW}}) as made:
        made.script.on("summary", summary, *[SUMMARY.replace("task-1", "sub-1")] * 8, spare=8)
        made.script.on("sub", "[sub-1]", *map(wordy, "abcdefgh"), "The part is done.")
        task = call("Agent", description="Part", prompt="Do the part. [sub-1]", subagent_type="general-purpose")
        ran = await done(made, task)
        assert "".join(ran.file("out.txt").split()) == "abcdefgh"
        made.exact(ran, ("clean", "compaction", "sub-agent"))
        roles = made.roles(ran)
        assert (set(roles["main"]), set(roles["sub"]), set(roles["summary"])) == ({Role.MAIN}, {Role.SUB_AGENT}, {Role.SUB_AGENT_SUMMARY})


@BOTH
async def test_malformed_arguments(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """No JSON (delivered as the text it is, beside a call that is one), the wrong keys, the wrong types, a tool that is not there."""
    broken = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo bad >> out.txt", "descr\n</tool_call>\n'
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, broken + add(1), call("Bash", cmd="echo bad"), call("Bash", command=7), call("Nothing", x=1.0), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)


async def test_arguments_in_another_spelling(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Numbers and keys come back as JavaScript writes them, text behind a call comes back before it: the same turn."""
    odd = '<tool_call>\n{"name": "Read", "arguments": {"limit": 1000.0, "offset": 1e0, "file_path": "/workspace/in.txt"}}\n</tool_call>'
    twice = (
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "false", "description": "x", "command": "echo 1 >> out.txt"}}\n</tool_call>'
    )
    async with claude(tmp_path, renderer, True) as made:
        made.script.on("main", "[task-1]", odd, f"Before.\n\n{twice}\n\nBehind it.", "All done.")
        ran = await made.run(TASK, {"in.txt": "é\n"})
        assert (ran.code, ran.file("out.txt")) == (0, "1\n"), ran.output
        made.exact(ran)


@BOTH
@pytest.mark.parametrize("nothing", ["<think>What now?</think>", ""], ids=["thinking-only", "empty"])
async def test_an_answer_without_anything(tmp_path: Path, renderer: TurnRenderer, stable: bool, nothing: str) -> None:
    """The turn vanishes and the message before it is edited: a branch that is explained, and what was said stays recorded."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, add(1), nothing, add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        tree = made.exact(ran, ("clean", "edit"))
        assert [c.difference for c in made.calls(ran)] == ["clean", "clean", "edit", "clean"]
        assert len(tree.leaves) == 2
        assert set(made.roles(ran)["main"]) == {Role.MAIN}


async def test_thoughts_in_tool_turns(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with claude(tmp_path, renderer, True) as made:
        ran = await done(made, "<think>Hm.</think>\n\nI go.\n" + add(1), "<think>And now?</think>" + add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)


@BOTH
async def test_engine_resets_in_mid_stream(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Some times in one call: the gateway goes on from the tokens so far, the client sees nothing of it."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, add(1), Reply("A long text. " * 20 + add(2), faults=FAULTS - 1, at=30))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)
        assert len(made.engines[0].served) == 3 + FAULTS - 1


@BOTH
async def test_a_call_that_breaks_for_good(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """The stream is reset after half a tool call: nothing of it is acted upon, the client asks again."""
    async with claude(tmp_path, renderer, stable, faults=0) as made:
        text = "A long text. " * 20
        ran = await done(made, add(1), Reply(text + add("bad"), faults=1, at=len(text) + 40), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "retry"))
        assert [c.fate for c in made.calls(ran)] == [Fate.DELIVERED, Fate.BROKEN, Fate.DELIVERED, Fate.DELIVERED]
        streamed = [json.loads(seen.body)["stream"] for seen in made.requests if seen.method == "POST"]
        assert streamed == [True] * 4


@BOTH
async def test_calls_that_break_before_their_first_token(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """It asks again, as a stream, until there is an answer; each attempt is recorded, none twice."""
    async with claude(tmp_path, renderer, stable, faults=1) as made:
        ran = await done(made, add(1), *[Reply(add("bad"), faults=2)] * 2, add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "retry"))
        assert [c.fate for c in made.calls(ran)].count(Fate.BROKEN) == 2


@BOTH
async def test_no_engine_for_a_while(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """All routes are closed for several pings: the call is held, not refused; each request comes once."""
    async with claude(tmp_path, renderer, stable) as made:
        await made.router.close(0, 1.0)
        opening = asyncio.get_running_loop().call_later(2.0, made.router.open, 0)
        ran = await done(made, add(1))
        assert opening.when() > 0
        assert ran.file("out.txt").split() == ["1"]
        made.exact(ran)


@BOTH
async def test_roles_are_transferred_in_mid_stream(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """One cell closes while it streams, the other one goes on, token by token."""
    async with claude(tmp_path, renderer, stable) as made:
        moved = Reply("A long text. " * 30 + add(2), at=40, act=lambda: made.move(0, 1), pause=0.01)
        ran = await done(made, add(1), moved, add(3))
        assert ran.file("out.txt").split() == ["1", "2", "3"]
        made.exact(ran)
        assert made.engines[0].served == ["call-0", "call-1"]
        assert made.engines[1].served == ["call-1", "call-2", "call-3"]


@BOTH
async def test_parallel_calls(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """Three tools in one turn."""
    async with claude(tmp_path, renderer, stable) as made:
        made.script.on(
            "main", "[task-1]", "\n".join(["At once.", add(1), add(2), call("Read", file_path="/workspace/in.txt")]), "All done."
        )
        ran = await made.run(TASK, {"in.txt": "read me\n"})
        assert ran.code == 0, ran.output
        assert sorted(ran.file("out.txt").split()) == ["1", "2"]
        made.exact(ran)
        assert "read me" in made.script.of("main")[-1].asked.text


@BOTH
@pytest.mark.parametrize("cut", ["A text that is cut he", add("bad")[:60]], ids=["text", "call"])
async def test_max_tokens_stop(tmp_path: Path, renderer: TurnRenderer, stable: bool, cut: str) -> None:
    """It reminds the model and goes on; a call that was cut is nothing but text."""
    async with claude(tmp_path, renderer, stable) as made:
        ran = await done(made, add(1), Reply(cut, cut=True), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran)
        assert [c.finish for c in made.calls(ran)] == ["stop", "length", "stop", "stop"]


async def test_tools_that_are_loaded_later(tmp_path: Path, renderer: TurnRenderer) -> None:
    """As it comes, it loads tools in the middle of a conversation: the head changes, the agent is the same."""
    async with claude(tmp_path, renderer, False) as made:
        ran = await done(made, add(1), call("ToolSearch", query="select:NotebookEdit,Monitor", max_results=5), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "edit"))
        assert [c.difference for c in made.calls(ran)] == ["clean", "clean", "edit", "clean"]
        assert set(made.roles(ran)["main"]) == {Role.MAIN}


async def test_the_cap_of_calls_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A refusal that repeating does not change: it stops at once and says why."""
    async with claude(tmp_path, renderer, True, {"gateway": {"max_calls": 3}}) as made:
        made.script.on("main", "[task-1]", *map(add, range(3)))
        ran = await made.run(TASK)
        assert ran.code == 1
        assert "all it may make" in ran.output
        assert ran.file("out.txt").split() == ["0", "1", "2"]
        made.exact(ran)
        assert len(made.requests) < 12
