"""Claude Code: its sub-agents, compactions and side queries, in their branches and roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.roles import SIDE_QUERY_ROLE
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients.claude import BOTH, TASK, add, bash, claude, done
from tests.harness.clients.script import Asked, Reply, call
from trees.records import Role

WINDOW = 120_000
"""Tokens (bytes, with this tokenizer): a first prompt has about 80,000; it compacts when less than some 20,000 are left."""

pytestmark = pytest.mark.harness


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
async def test_a_sub_agent_forked_from_the_main_conversation(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """It goes on from main's own turn, under an id; main, which does so after it, is no edit."""
    async with claude(tmp_path, renderer, stable) as made:
        made.script.on("fork", lambda asked: "[sub-1]" in asked.last, "The part is done.")
        task = call("Agent", description="Part", prompt="Do the part. [sub-1]", subagent_type="fork")
        made.script.on("main", "[task-1]", task, add(1), "All done.", "All done.", spare=1)
        ran = await made.run(TASK)
        assert (ran.code, ran.file("out.txt")) == (0, "1\n"), ran.output
        made.exact(ran, ("clean", "sub-agent"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["fork"]) == ({Role.MAIN}, [Role.SUB_AGENT])


async def test_a_tool_that_asks_the_model_itself(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A web search is a call of its own under another prompt: a side query, trained last."""
    async with claude(tmp_path, renderer, True) as made:
        made.script.on("search", "Perform a web search", "Nothing found.")
        ran = await done(made, call("WebSearch", query="what is this"), add(1))
        assert ran.file("out.txt").split() == ["1"]
        made.exact(ran, ("clean", "side-query"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["search"]) == ({Role.MAIN}, [SIDE_QUERY_ROLE])


async def test_tools_that_are_loaded_later(tmp_path: Path, renderer: TurnRenderer) -> None:
    """As it comes, it loads tools in the middle of a conversation: the head changes, the agent is the same."""
    async with claude(tmp_path, renderer, False) as made:
        ran = await done(made, add(1), call("ToolSearch", query="select:NotebookEdit,Monitor", max_results=5), add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "edit"))
        assert [c.difference for c in made.calls(ran)] == ["clean", "clean", "edit", "clean"]
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
