"""Claude Code, while engines fail, are away or change their roles, and at the cap of its calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients.bench import FAULTS
from tests.harness.clients.claude import BOTH, TASK, add, claude, done
from tests.harness.clients.script import Reply
from trees.records import Fate

pytestmark = pytest.mark.harness


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
async def test_overload(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    """The engine is full with others' calls, at the start and in the middle of a turn: calls are held behind them, none comes twice."""
    async with claude(tmp_path, renderer, stable) as made:
        first = asyncio.create_task(made.crowd(2.0))
        busy = Reply("A long text. " * 20 + add(2), at=40, act=lambda: made.crowd(2.0), pause=0.005)
        ran = await done(made, add(1), busy, add(3))
        await first
        assert ran.file("out.txt").split() == ["1", "2", "3"]
        made.exact(ran)
        assert made.crowds == 2
        asked = [seen.body for seen in made.requests if seen.path.startswith("/x/") and seen.method == "POST"]
        assert len(asked) == len(set(asked)) == 4


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


async def test_a_client_that_is_stopped_in_mid_stream(tmp_path: Path, renderer: TurnRenderer) -> None:
    """Its box is killed: the engine's call is cancelled, what was said until then is kept and is no target."""
    async with claude(tmp_path, renderer, True) as made:
        stop = asyncio.Event()

        async def kill() -> None:
            stop.set()

        endless = Reply("A long text. " * 600, at=200, act=kill, pause=0.05)
        made.script.on("main", "[task-1]", add(1), endless)
        ran = await made.run(TASK, stop=stop)
        assert ran.code != 0
        assert ran.file("out.txt").split() == ["1"]
        made.exact(ran)
        assert [call.fate for call in made.calls(ran)] == [Fate.DELIVERED, Fate.CANCELLED]
        assert 200 <= made.script.of("main")[1].said < len(endless.text)
