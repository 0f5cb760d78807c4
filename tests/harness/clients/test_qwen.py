"""qwen-code, as it comes from npm, in a box against the gateway: no ids; sub-agents, summaries and looks back are told by their words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients import scenarios
from tests.harness.clients.bench import Bench
from tests.harness.clients.scenarios import Client, mains, says
from tests.harness.clients.script import Asked, Reply, call
from trees.records import Fate, Role

pytestmark = pytest.mark.harness


def shell(command: str) -> str:
    return call("run_shell_command", command=command, is_background=False)


QWEN = Client("qwen-code", shell)


def looks_back(made: Bench) -> None:
    """What it asks beside its task, when and as often as it likes."""
    made.script.on("memory", lambda asked: "managed memory extraction" in asked.system, *["Nothing."] * 8, spare=8)


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
    async with QWEN.bench(tmp_path, renderer) as made:
        looks_back(made)
        await scenario(QWEN, made)


async def test_a_call_that_breaks_for_good(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It keeps the text that it has, asks to go on from there, and joins both into one turn: context, of a lost call, and no drift."""
    async with QWEN.bench(tmp_path, renderer, faults=0) as made:
        looks_back(made)
        text = scenarios.LONG
        ran = await QWEN.done(made, QWEN.add(1), Reply(text + QWEN.add("bad"), faults=1, at=len(text) + 40), QWEN.add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "lost-call", "side-query"))
        assert mains(made, ran) == ["clean", "clean", "lost-call", "lost-call"]
        assert [c.fate for c in made.calls(ran)].count(Fate.BROKEN) == 1


async def test_sub_agents(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Two at once, in the foreground; known by their system prompt alone."""
    async with QWEN.bench(tmp_path, renderer) as made:
        looks_back(made)
        for name in ("one", "two"):
            made.script.on(name, says(f"[sub-{name}]"), Reply(shell(f"echo {name} > {name}.txt"), pause=0.02), f"Part {name} is done.")
        more = {"subagent_type": "general-purpose", "run_in_background": False}
        tasks = [call("agent", description="Part", prompt=f"Do it. [sub-{name}]", **more) for name in ("one", "two")]
        ran = await QWEN.done(made, "\n".join(tasks), QWEN.add("main"))
        assert [ran.file(f"{name}.txt").strip() for name in ("one", "two")] == ["one", "two"]
        made.exact(ran, ("clean", "sub-agent", "side-query"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["one"], roles["two"]) == ({Role.MAIN}, [Role.SUB_AGENT] * 2, [Role.SUB_AGENT] * 2)


def summary(asked: Asked) -> bool:
    return "produce the <state_snapshot>" in asked.last


async def test_compaction(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Its summary is asked for under the same head; then it goes on from it, with words of its own before the call at work."""
    snapshot = "<state_snapshot>The numbers go to out.txt. [task-1]</state_snapshot>"
    async with QWEN.bench(tmp_path, renderer, {"model": {"window": 150_000}}) as made:
        looks_back(made)
        made.script.on("summary", summary, *[snapshot] * 4, spare=4)
        ran = await QWEN.done(made, *(shell(f"echo {i} >> out.txt; head -c 12000 /dev/zero | tr '\\0' {i}") for i in range(8)))
        assert ran.file("out.txt").split() == [str(i) for i in range(8)]
        made.exact(ran, ("clean", "compaction", "edit", "side-query"))
        roles = made.roles(ran)
        assert set(roles["main"]) == {Role.MAIN}
        assert set(roles["summary"]) == {Role.MAIN_SUMMARY}


async def test_malformed_arguments(tmp_path: Path, renderer: TurnRenderer) -> None:
    """No JSON (delivered as the text it is, beside a call that is one), the wrong keys, the wrong types, a tool that is not there."""
    broken = '<tool_call>\n{"name": "run_shell_command", "arguments": {"command": "echo bad >> out.txt", "descr\n</tool_call>\n'
    async with QWEN.bench(tmp_path, renderer) as made:
        looks_back(made)
        odd = [call("run_shell_command", cmd="echo bad"), call("run_shell_command", command=7), call("nothing", x=1.0)]
        ran = await QWEN.done(made, broken + QWEN.add(1), *odd, QWEN.add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "side-query"))
        assert mains(made, ran) == ["clean"] * 6


@pytest.mark.parametrize("nothing", ["<think>What now?</think>", ""], ids=["thinking-only", "empty"])
async def test_an_answer_without_anything_is_asked_for_again(tmp_path: Path, renderer: TurnRenderer, nothing: str) -> None:
    """With the same bytes: another answer is sampled, and the one that said nothing is superseded."""
    async with QWEN.bench(tmp_path, renderer) as made:
        looks_back(made)
        ran = await QWEN.done(made, QWEN.add(1), nothing, QWEN.add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "retry", "side-query"))
        fates = [c.fate for c in made.calls(ran) if made.script.said[f"call-{c.call}"].conversation == "main"]
        assert fates == [Fate.DELIVERED, Fate.SUPERSEDED, Fate.DELIVERED, Fate.DELIVERED]


async def test_max_tokens_stop(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with QWEN.bench(tmp_path, renderer) as made:
        looks_back(made)
        await scenarios.a_cut_answer_ends_the_task(QWEN, made)


async def test_the_cap_of_calls_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with QWEN.bench(tmp_path, renderer, {"gateway": {"max_calls": 3}}) as made:
        looks_back(made)
        await scenarios.the_cap_of_calls_ends_it(QWEN, made)
