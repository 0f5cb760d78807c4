"""opencode, as it comes from npm, in a box against the gateway: a title beside the first call, calls that it renames, summaries as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients import scenarios
from tests.harness.clients.bench import Bench, Ran
from tests.harness.clients.scenarios import Client, asks, mains, says
from tests.harness.clients.script import Reply, call
from trees.records import Role


def shell(command: str) -> str:
    return call("bash", command=command, description="Go on")


def title(made: Bench) -> None:
    made.script.on("title", lambda asked: "title generator" in asked.system, "A title", spare=1)


class Opencode(Client):
    """Its title query is answered, too; that and the first call of the task come in any order."""

    async def done(self, made: Bench, *replies: Reply | str, files: Mapping[str, str] | None = None) -> Ran:
        title(made)
        return await super().done(made, *replies, files=files)


pytestmark = pytest.mark.harness
OPENCODE = Opencode("opencode", shell)


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
    async with OPENCODE.bench(tmp_path, renderer) as made:
        await scenario(OPENCODE, made)


async def test_a_title_is_a_side_query_also_when_it_comes_first(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with OPENCODE.bench(tmp_path, renderer, stable=False) as made:
        ran = await OPENCODE.done(made, OPENCODE.add(1))
        made.exact(ran, ("clean", "side-query"))
        assert made.roles(ran) == {"title": [Role.SUB_AGENT_SUMMARY], "main": [Role.MAIN] * 2}


async def test_a_call_that_breaks_for_good(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with OPENCODE.bench(tmp_path, renderer, faults=0) as made:
        await scenarios.a_call_that_breaks_for_good(OPENCODE, made)


async def test_sub_agents(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Two at once, each a session of its own."""
    async with OPENCODE.bench(tmp_path, renderer) as made:
        for name in ("one", "two"):
            made.script.on(name, says(f"[sub-{name}]"), Reply(shell(f"echo {name} > {name}.txt"), pause=0.02), f"Part {name} is done.")
        tasks = [call("task", description="Part", prompt=f"Do it. [sub-{name}]", subagent_type="general") for name in ("one", "two")]
        ran = await OPENCODE.done(made, "\n".join(tasks), OPENCODE.add("main"))
        assert [ran.file(f"{name}.txt").strip() for name in ("one", "two")] == ["one", "two"]
        made.exact(ran, ("clean", "sub-agent", "side-query"))
        roles = made.roles(ran)
        assert (set(roles["main"]), roles["one"], roles["two"]) == ({Role.MAIN}, [Role.SUB_AGENT] * 2, [Role.SUB_AGENT] * 2)


async def test_compaction(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It tells the conversation as one text to be summarised, then goes on from the summary."""
    async with OPENCODE.bench(tmp_path, renderer, {"model": {"window": 80_000}, "harness": {"max_tokens": 4096}}) as made:
        made.script.on("summary", asks("<conversation>"), *["The numbers go to out.txt. [task-1]"] * 4, spare=4)
        made.script.on("on", says("What did we do so far?"), *[shell(f"echo {i} >> out.txt") for i in (5, 6)], "All done.")
        title(made)
        wordy = [shell(f"echo {i} >> out.txt; head -c 12000 /dev/zero | tr '\\0' {i}") for i in range(5)]
        made.script.on("main", says("[task-1]"), *wordy)
        ran = await made.run(scenarios.TASK)
        assert ran.file("out.txt").split() == [str(i) for i in range(7)]
        made.exact(ran, ("clean", "side-query", "compaction"))
        roles = made.roles(ran)
        assert set(roles["main"]) == set(roles["on"]) == {Role.MAIN}
        assert set(roles["summary"]) == {Role.MAIN_SUMMARY}


async def test_malformed_arguments(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A tool that is not there comes back as `invalid`, its arguments lost; the tree keeps what was said, and does not fork."""
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo bad >> out.txt", "descr\n</tool_call>\n'
    async with OPENCODE.bench(tmp_path, renderer) as made:
        odd = [call("bash", cmd="echo bad"), call("bash", command=7), call("nothing", x=1.0), call("Bash", command="echo 2 >> out.txt")]
        ran = await OPENCODE.done(made, broken + OPENCODE.add(1), *odd, OPENCODE.add(3))
        assert ran.file("out.txt").split() == ["1", "2", "3"]
        made.exact(ran, ("clean", "side-query"))
        assert mains(made, ran) == ["clean"] * 7


@pytest.mark.parametrize("nothing", ["<think>What now?</think>", ""], ids=["thinking-only", "empty"])
async def test_an_answer_without_anything_ends_the_task(tmp_path: Path, renderer: TurnRenderer, nothing: str) -> None:
    async with OPENCODE.bench(tmp_path, renderer) as made:
        title(made)
        made.script.on("main", says("[task-1]"), OPENCODE.add(1), nothing)
        ran = await made.run(scenarios.TASK)
        assert (ran.code, ran.file("out.txt").split()) == (0, ["1"])
        made.exact(ran, ("clean", "side-query"))


async def test_a_max_tokens_stop_ends_the_task(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with OPENCODE.bench(tmp_path, renderer) as made:
        title(made)
        await scenarios.a_cut_answer_ends_the_task(OPENCODE, made)


async def test_the_cap_of_calls_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with OPENCODE.bench(tmp_path, renderer, {"gateway": {"max_calls": 3}}) as made:
        title(made)
        await scenarios.the_cap_of_calls_ends_it(OPENCODE, made)
