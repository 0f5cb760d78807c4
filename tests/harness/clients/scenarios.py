"""What every client that speaks one of OpenAI's dialects goes through: a task, the trouble on its way, its end, and the tree it leaves.

Each scenario checks that the task is done (a file in the workspace), and by `Bench.exact` that the tree is what the script says; what is
peculiar to a client stands in its own module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients.bench import FAULTS, Bench, Ran, bench
from tests.harness.clients.script import Asked, Reply
from trees.records import Fate, Role
from trees.tree import Tree

TASK = "Do what the tools tell you. [task-1]"
LONG = "A long text. " * 20
Sections = Mapping[str, Mapping[str, Any]]


Scenario = Callable[["Client", Bench], Awaitable[object]]


def says(mark: str) -> Callable[[Asked], bool]:
    """Accepts prompts in which the user (not a tool) says this."""
    return lambda asked: any(role == "user" and mark in text and "<tool_response>" not in text for role, text in asked.turns)


def asks(*marks: str) -> Callable[[Asked], bool]:
    """Accepts prompts whose last turn has one of these."""
    return lambda asked: any(mark in asked.last for mark in marks)


@dataclass(frozen=True)
class Client:
    """`shell`: a command -> what the policy writes to run it; `end`: what it writes at the task's end."""

    kind: str
    shell: Callable[[str], str]
    end: str = "All done."

    def add(self, text: object) -> str:
        """A call that adds a line to the file by which the task is judged."""
        return self.shell(f"echo {text} >> out.txt")

    def bench(
        self, folder: Path, renderer: TurnRenderer, tree: Sections | None = None, stable: bool = True, faults: int = FAULTS
    ) -> AbstractAsyncContextManager[Bench]:
        """See bench.bench."""
        sections = dict(tree or {})
        return bench(folder, renderer, self.kind, {**sections, "harness": {"stable": stable, **sections.get("harness", {})}}, faults)

    async def done(self, made: Bench, *replies: Reply | str, files: Mapping[str, str] | None = None) -> Ran:
        """Run the task with these replies in the main conversation, then the end: it ends well, and all was asked for."""
        made.script.on("main", says("[task-1]"), *replies, self.end)
        ran = await made.run(TASK, files)
        assert ran.code == 0, ran.output
        return ran


def mains(made: Bench, ran: Ran) -> list[str]:
    """Differences of the main conversation's calls."""
    return [c.difference for c in made.calls(ran) if made.script.said[f"call-{c.call}"].conversation == "main"]


async def many_tool_turns(client: Client, made: Bench) -> Tree:
    ran = await client.done(made, *(f"Step {i}.\n" + client.add(i) for i in range(20)))
    assert ran.file("out.txt").split() == [str(i) for i in range(20)]
    tree = made.exact(ran, ("clean", "side-query"))
    assert set(made.roles(ran)["main"]) == {Role.MAIN}
    assert mains(made, ran) == ["clean"] * 21
    return tree


async def thoughts_in_tool_turns(client: Client, made: Bench) -> None:
    ran = await client.done(made, "<think>Hm.</think>\n\nI go.\n" + client.add(1), "<think>And now?</think>" + client.add(2))
    assert ran.file("out.txt").split() == ["1", "2"]
    made.exact(ran, ("clean", "side-query"))
    assert mains(made, ran) == ["clean"] * 3


async def parallel_calls(client: Client, made: Bench) -> None:
    """Three tools in one turn."""
    ran = await client.done(made, "At once.\n" + "\n".join(map(client.add, range(3))), client.add("last"))
    assert sorted(ran.file("out.txt").split()) == ["0", "1", "2", "last"]
    made.exact(ran, ("clean", "side-query"))
    assert mains(made, ran) == ["clean"] * 3


async def engine_resets_in_mid_stream(client: Client, made: Bench) -> None:
    """Some times in one call: the gateway goes on from the tokens so far, the client sees nothing of it."""
    ran = await client.done(made, client.add(1), Reply(LONG + client.add(2), faults=FAULTS - 1, at=30))
    assert ran.file("out.txt").split() == ["1", "2"]
    made.exact(ran, ("clean", "side-query"))
    assert mains(made, ran) == ["clean"] * 3


async def a_call_that_breaks_for_good(client: Client, made: Bench) -> None:
    """The answer fails visibly after half a tool call: nothing of it is acted upon, and the client asks again. (A bench with faults=0.)"""
    ran = await client.done(made, client.add(1), Reply(LONG + client.add("bad"), faults=1, at=len(LONG) + 40), client.add(2))
    assert ran.file("out.txt").split() == ["1", "2"]
    tree = made.exact(ran, ("clean", "side-query", "retry"))
    fates = [c.fate for c in tree.calls.values() if made.script.said[f"call-{c.call}"].conversation == "main"]
    assert fates == [Fate.DELIVERED, Fate.BROKEN, Fate.DELIVERED, Fate.DELIVERED]
    assert mains(made, ran) == ["clean", "clean", "retry", "clean"]


async def no_engine_for_a_while(client: Client, made: Bench) -> None:
    """All routes are closed for several pings: the call is held, not refused; each request comes once."""
    await made.router.close(0, 1.0)
    opening = asyncio.get_running_loop().call_later(3.0, made.router.open, 0)
    ran = await client.done(made, client.add(1))
    assert opening.when() > 0
    assert ran.file("out.txt").split() == ["1"]
    made.exact(ran, ("clean", "side-query"))


async def overload(client: Client, made: Bench) -> None:
    """The engine is full with others' calls, at the start and again in the middle of a turn: what comes next is held behind them, for
    several pings, and not refused; each request comes once."""
    first = asyncio.create_task(made.crowd(2.0))
    busy = Reply(LONG + client.add(2), at=40, act=lambda: made.crowd(2.0), pause=0.005)
    ran = await client.done(made, client.add(1), busy, client.add(3))
    await first
    assert ran.file("out.txt").split() == ["1", "2", "3"]
    made.exact(ran, ("clean", "side-query"))
    assert mains(made, ran) == ["clean"] * 4
    assert made.crowds == 2
    asked = [seen.body for seen in made.requests if seen.method == "POST"]
    assert len(asked) == len(set(asked))


async def roles_are_transferred_in_mid_stream(client: Client, made: Bench) -> None:
    """One cell closes while it streams, the other one goes on, token by token."""
    moved = Reply(LONG + client.add(2), at=40, act=lambda: made.move(0, 1), pause=0.01)
    ran = await client.done(made, client.add(1), moved, client.add(3))
    assert ran.file("out.txt").split() == ["1", "2", "3"]
    made.exact(ran, ("clean", "side-query"))
    assert mains(made, ran) == ["clean"] * 4
    (twice,) = set(made.engines[0].served) & set(made.engines[1].served)
    assert made.script.said[twice].reply is moved


async def a_cut_answer_ends_the_task(client: Client, made: Bench) -> None:
    """An answer that max_tokens cut is the end of the work for it; what was cut is recorded."""
    made.script.on("main", says("[task-1]"), client.add(1), Reply("A text that is cut he", cut=True))
    ran = await made.run(TASK)
    assert (ran.code, ran.file("out.txt").split()) == (0, ["1"])
    made.exact(ran, ("clean", "side-query"))


async def the_cap_of_calls_ends_it(client: Client, made: Bench) -> None:
    """A refusal that repeating does not change: it stops, and says why. The bench's `gateway.max_calls` is 3."""
    made.script.on("main", says("[task-1]"), *map(client.add, range(3)), spare=2)
    ran = await made.run(TASK)
    assert ran.code == 1
    assert "all it may make" in ran.output
    assert ran.file("out.txt").split() == ["0", "1", "2"][: len(made.script.of("main"))]
    made.exact(ran, ("clean", "side-query"))
    assert len(made.requests) < 8
