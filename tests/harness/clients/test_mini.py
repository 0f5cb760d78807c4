"""mini-swe-agent, as it comes from PyPI, in a box against the gateway: no stream, no ids, and turns without a tool call are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients import scenarios
from tests.harness.clients.scenarios import Client, says
from tests.harness.clients.script import Reply, call
from trees.records import Role

pytestmark = pytest.mark.harness


def shell(command: str) -> str:
    return call("bash", command=command)


MINI = Client("mini-swe-agent", shell, end=shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.many_tool_turns,
        scenarios.parallel_calls,
        scenarios.engine_resets_in_mid_stream,
        scenarios.no_engine_for_a_while,
        scenarios.overload,
        scenarios.roles_are_transferred_in_mid_stream,
    ],
)
async def test_scenario(tmp_path: Path, renderer: TurnRenderer, scenario: scenarios.Scenario) -> None:
    async with MINI.bench(tmp_path, renderer) as made:
        await scenario(MINI, made)


async def test_a_call_that_breaks_for_good(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with MINI.bench(tmp_path, renderer, faults=0) as made:
        await scenarios.a_call_that_breaks_for_good(MINI, made)


async def test_turns_without_a_usable_call(tmp_path: Path, renderer: TurnRenderer) -> None:
    """They are dropped and complained about: an edit, the same conversation still. What said nothing at all is no turn, so no edit."""
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo bad >> out.txt", "descr\n</tool_call>'
    dropped = [broken, call("nothing", x=1.0), call("bash", cmd="echo bad")]
    async with MINI.bench(tmp_path, renderer) as made:
        replies = ["No call at first.", *dropped[:1], MINI.add(1), *dropped[1:], MINI.add(2), "<think>Hm.</think>", "", MINI.add(3)]
        ran = await MINI.done(made, *replies)  # three in a row would end it
        assert ran.file("out.txt").split() == ["1", "2", "3"]
        tree = made.exact(ran, ("clean", "edit"))
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
        sampled = {c.sampled for c in tree.calls.values()}
        assert len(sampled) == len(tree.calls) == 10


async def test_max_tokens_stop(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It drops the turn, tells the model of the limit, and goes on."""
    async with MINI.bench(tmp_path, renderer) as made:
        ran = await MINI.done(made, MINI.add(1), Reply("A text that is cut he", cut=True), MINI.add(2))
        assert ran.file("out.txt").split() == ["1", "2"]
        made.exact(ran, ("clean", "edit"))
        assert [c.finish for c in made.calls(ran)] == ["stop", "length", "stop", "stop"]


async def test_a_full_window_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It does not compact: the refusal of a prompt that is too long is its orderly end."""
    async with MINI.bench(tmp_path, renderer, {"model": {"window": 16_000}}) as made:
        made.script.on(
            "main", says("[task-1]"), *[shell(f"echo {i} >> out.txt; head -c 5000 /dev/zero | tr '\\0' {i}") for i in range(3)], spare=2
        )
        ran = await made.run(scenarios.TASK)
        assert ran.code is not None
        assert "maximum context length" in ran.output
        made.exact(ran)


async def test_the_cap_of_calls_ends_it(tmp_path: Path, renderer: TurnRenderer) -> None:
    """A refusal that repeating does not change: it stops, and says why."""
    async with MINI.bench(tmp_path, renderer, {"gateway": {"max_calls": 3}}) as made:
        made.script.on("main", says("[task-1]"), *map(MINI.add, range(3)), spare=2)
        ran = await made.run(scenarios.TASK)
        assert ran.code is not None
        assert "all it may make" in ran.output
        assert ran.file("out.txt").split() == ["0", "1", "2"][: len(made.script.of("main"))]
        made.exact(ran, ("clean", "side-query"))
        assert len(made.requests) < 8
