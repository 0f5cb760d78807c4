"""A hand-over changes no token: each trap is provoked, at an engine that answers wrongly where vLLM does (fake_kv.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from gyre_hpc.engines.factory import link
from gyre_hpc.engines.handover import Counters, Departure
from gyre_hpc.engines.protocol import Doubt, EngineAddress, EngineFault, GenerateRequest, Sampling, Ticket
from tests.engines.fake_kv import BLOCK, WRONG, FakeEngine, undisturbed

PROMPT = list(range(50, 71))


def pair(**changes: Any) -> tuple[FakeEngine, FakeEngine]:
    peers: dict[str, FakeEngine] = {}
    return FakeEngine("a", peers, **changes), FakeEngine("b", peers, **changes)


async def tokens_of(stream: Any) -> list[int]:
    return [token async for chunk in stream for token in chunk.tokens.tolist()]


def call(n: int = 6, prompt: list[int] = PROMPT, ticket: Ticket | None = None) -> GenerateRequest:
    return GenerateRequest("c", prompt, Sampling(n, 0.0), 0, ticket)


async def test_a_call_and_a_waiting_conversation_take_their_kv_along() -> None:
    a, b = pair()
    begun = await tokens_of(a.generate(call(5)))
    departure = Departure(a)
    rest = await tokens_of(departure.stream(b, b, call(6, PROMPT + begun)))
    assert begun + rest == undisturbed(PROMPT, 11)
    waiting = [7] * 30
    assert await departure.bring(b, b, waiting)
    await departure.end()
    report = await departure.report()
    assert (report["calls"], report["conversations"], report["recomputed"], report["left"], report["doubts"]) == (1, 1, 0, 0, {})
    brought = 26 + 29  # of one that waits the whole blocks, and one
    assert (report["tokens"], report["bytes"]) == (brought, brought * 100)
    assert set(report["phases"]) == {"pin", "pull"}
    assert b.computed == 0
    turn = [*waiting, 1, 2, 3]
    assert await tokens_of(b.generate(call(4, turn))) == undisturbed(turn, 4)
    assert b.computed <= 4 + 3  # a block and what is new
    assert not a.pins


async def test_without_the_checks_the_same_traps_give_wrong_tokens() -> None:
    """What the fake is for: else the tests below would pass with any code."""
    a, b = pair(lease=0.05)
    late = await a.pin(PROMPT)
    await asyncio.sleep(0.06)
    other = await a.pin(PROMPT)
    for ticket, prompt in ((late, PROMPT), (other, [*PROMPT[:-1], 3])):
        assert await tokens_of(b.generate(call(2, prompt, Ticket(prompt, 0, float("inf"), ticket.params)))) == [WRONG] * 2


TRAPS: dict[str, Callable[[FakeEngine, FakeEngine], None]] = {
    "slow": lambda a, b: setattr(b, "pull_delay", 2.0),
    "pin": lambda a, b: setattr(a, "pin_delay", 1.0),
    "length": lambda a, b: setattr(a, "pinned_short", 1),
    "version": lambda a, b: setattr(b, "version", 1),
    "source": lambda a, b: setattr(a, "broken", True),
}


@pytest.mark.parametrize("trap", TRAPS)
async def test_a_trap_costs_a_computation_and_no_token(trap: str) -> None:
    a, b = pair(patience=0.2, lease=0.6)
    begun = await tokens_of(a.generate(call(5)))
    TRAPS[trap](a, b)
    departure = Departure(a)
    stream = departure.stream(b, b, call(6, PROMPT + begun))
    assert await tokens_of(stream) == undisturbed(PROMPT + begun, 6, b.version)
    assert not await departure.bring(b, b, [9] * 10)
    await departure.end()
    report = await departure.report()
    assert (report["calls"], report["recomputed"], report["left"], report["doubts"]) == (0, 1, 1, {trap: 2})
    assert b.forgotten == (2 if trap == "slow" else 0)
    assert not a.pins, "given back, not left to the lease"
    assert not b.live


async def test_a_late_or_foreign_ticket_never_reaches_the_engine() -> None:
    a, b = pair()
    ticket = await a.pin(PROMPT)
    with pytest.raises(Doubt, match="not the pinned one"):
        await tokens_of(b.generate(call(2, [*PROMPT[:-1], 3], ticket)))
    with pytest.raises(Doubt, match="not the pinned one of 21"):
        await tokens_of(b.generate(call(2, [*PROMPT, 3], ticket)))
    with pytest.raises(Doubt, match="past our deadline"):
        await tokens_of(b.generate(call(2, PROMPT, Ticket(PROMPT, 0, time.monotonic(), ticket.params))))
    assert b.pulled == 0
    assert await tokens_of(b.generate(call(2, list(PROMPT), ticket))) == undisturbed(PROMPT, 2)


async def test_a_first_token_after_the_deadline_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop stood still: the token is there, and so is the deadline."""
    a, b = pair(patience=0.2, lease=0.1, step=0.0)
    ticket = await a.pin(PROMPT)
    stream = b.generate(call(2, PROMPT, ticket))
    original = b._pull

    async def stalled(ticket: Ticket, tokens: list[int]) -> bool:
        time.sleep(0.25)
        return await original(ticket, tokens)

    monkeypatch.setattr(b, "_pull", stalled)
    with pytest.raises(Doubt, match="no token") as caught:
        await Departure(a)._pull(stream, ticket)
    assert caught.value.reason == "slow"
    await stream.aclose()


async def test_a_destination_that_breaks_is_forgotten_by_nobody_and_faults_as_ever() -> None:
    a, b = pair()
    b.broken = True
    departure = Departure(a)
    with pytest.raises(EngineFault, match="b is broken"):
        await tokens_of(departure.stream(b, b, call()))
    await departure.end()
    report = await departure.report()
    assert report["doubts"] == {"destination": 1}
    assert a.pins, "the destination may still be pulling: the lease ends it"


async def test_a_destination_that_is_gone_leaves_no_pin() -> None:
    """It would hold up the source's pause for the rest of the lease."""
    a, b = pair()
    b.broken = b.gone = True
    departure = Departure(a)
    assert not await departure.bring(b, b, [7] * 30)
    await departure.end()
    assert (await departure.report())["doubts"] == {"destination": 1}
    assert not a.pins


async def test_a_conversation_shorter_than_a_block_has_nothing_to_bring() -> None:
    a, b = pair()
    departure = Departure(a)
    assert not await departure.bring(b, b, [7] * BLOCK)
    assert await departure.bring(b, b, [7] * (BLOCK + 1))
    await departure.end()
    report = await departure.report()
    assert (report["doubts"], report["conversations"], report["left"], report["tokens"]) == ({"short": 1}, 1, 1, BLOCK + 1)


async def test_what_is_given_up_is_undone() -> None:
    a, b = pair(patience=30.0)
    b.pull_delay = 30.0
    departure = Departure(a)
    task = asyncio.create_task(departure.bring(b, b, [7] * 30))
    await asyncio.sleep(0.02)
    assert a.pins
    task.cancel()
    await asyncio.wait([task])
    await departure.end()
    assert not a.pins
    assert b.forgotten == 1
    assert not b.live


async def test_engines_that_cannot_and_departures_that_are_over_compute() -> None:
    a, b = pair()
    departure = Departure(a)
    assert await tokens_of(departure.stream(b, None, call())) == undisturbed(PROMPT, 6)
    await departure.end()
    assert await tokens_of(departure.stream(b, b, call())) == undisturbed(PROMPT, 6)
    await departure.end()
    assert (await departure.report())["doubts"] == {"unable": 1, "over": 1}
    assert link(EngineAddress("torch", "http://localhost:1", 8, 512)) is None


def test_counters_since() -> None:
    assert Counters(5, 6, 7, 8).since(Counters(1, 1, 1, 2)) == Counters(4, 5, 6, 6)
