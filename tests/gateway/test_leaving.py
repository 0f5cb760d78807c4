"""A cell leaves phase by phase; taken back at any of them, no call notices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cells.events import Role
from cells.transfer import ORDER
from gyre_hpc.engines.protocol import EngineAddress
from gyre_hpc.gateway.leaving import added
from gyre_hpc.gateway.router import Router
from tests.engines.fake_kv import undisturbed
from tests.gateway.test_handover import begun, home_of, routed, turn

AT_GATEWAY = [phase.value for phase in ORDER[Role.TRAINING]][:5]


def cells(router: Router) -> dict[int, dict[str, Any]]:
    found: Any = router.counts()["cells"]
    return dict(found)


async def test_each_phase_does_its_part_and_no_more() -> None:
    router, engines = routed(2)
    await turn(router, 1, [3] * 20, 3)  # waits for a tool, at the last cell
    here = home_of(router, 1)
    task = asyncio.create_task(turn(router, 1, [1] * 20, 60))
    await begun(engines)
    assert await router.phase(here, "unroute", 1.0) == {"executions": 1}
    assert cells(router)[here]["in_flight"] == 1, "what is in flight goes on there"
    assert home_of(router, 1) == here
    assert await router.phase(here, "reserve", 1.0) == {"executions": 1, "placed": 1}
    assert home_of(router, 1) == 1 - here
    assert await router.phase(here, "hold", 1.0) == {"calls": 1, "conversations": 1}
    assert (router.counts()["in_flight"], router.counts()["held"]) == (0, 1), "held, though another cell has room"
    assert await router.phase(here, "hold", 1.0) == {"calls": 1, "conversations": 1}, "asked for again"
    assert await router.phase(here, "hand-over", 1.0) == {"moved": 1, "held": 0}
    answer = await router.phase(here, "acknowledge", 5.0)
    assert (answer["acknowledged"], answer["handover"]["calls"], answer["handover"]["conversations"]) == (2, 1, 1)
    assert (await router.phase(here, "acknowledge", 5.0))["acknowledged"] == 2
    assert engines[1 - here].pulled
    assert await task == undisturbed([1] * 20, 60)
    await router.aclose()


@pytest.mark.parametrize("upto", range(1, 6))
async def test_taken_back_after_any_phase_nothing_has_happened(upto: int) -> None:
    router, engines = routed(2, capacity=2)
    task = asyncio.create_task(turn(router, 1, [1] * 20, 50))
    await begun(engines)
    here = home_of(router, 1)
    for phase in AT_GATEWAY[:upto]:
        await router.phase(here, phase, 5.0)
    for phase in reversed(AT_GATEWAY[:upto]):
        await router.phase(here, phase, 5.0, undo=True)
    assert all(cell["open"] for cell in cells(router).values())
    if upto <= 2:
        assert home_of(router, 1) == here, "the place is given back"
    assert await task == undisturbed([1] * 20, 50)
    assert await turn(router, 1, [1] * 21, 3) == undisturbed([1] * 21, 3)
    assert not any(engine.pins for engine in engines)
    await router.aclose()


async def test_what_was_handed_over_is_not_at_the_cell_again_when_it_returns() -> None:
    router, engines = routed(2)
    await turn(router, 1, [3] * 20, 3)
    here = home_of(router, 1)
    for phase in AT_GATEWAY:
        await router.phase(here, phase, 5.0)
    router.open(here)
    pinned = engines[here].computed
    assert await router.phase(here, "unroute", 1.0) == {"executions": 0}
    await router.phase(here, "reserve", 1.0)
    assert await router.phase(here, "hold", 1.0) == {"calls": 0, "conversations": 0}
    assert engines[here].computed == pinned
    await router.aclose()


async def test_a_place_is_waited_for_and_no_cell_gets_more_than_it_holds() -> None:
    router, _ = routed(2, capacity=1)
    first = asyncio.create_task(turn(router, 1, [1] * 20, 3))
    second = asyncio.create_task(turn(router, 2, [2] * 20, 3))
    await asyncio.gather(first, second)
    here = home_of(router, 1)
    await router.phase(here, "unroute", 1.0)
    assert await router.phase(here, "reserve", 0.05) == {"executions": 1, "placed": 0}
    waiting = asyncio.create_task(router.phase(here, "reserve", 5.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    router.forget(2)  # the other one has ended
    assert await waiting == {"executions": 1, "placed": 1}
    assert home_of(router, 1) == 1 - here
    await router.aclose()


async def test_a_phase_out_of_turn_is_refused_and_its_undo_is_nothing() -> None:
    router, _ = routed(1)
    with pytest.raises(KeyError, match="hold before unroute"):
        await router.phase(0, "hold", 1.0)
    assert await router.phase(0, "hold", 1.0, undo=True) == {}
    assert await router.phase(17, "unroute", 1.0) == {"executions": 0}, "a cell without an engine leaves at once"
    await router.aclose()


@pytest.mark.parametrize("replaced", [False, True])
async def test_what_is_held_goes_on_when_another_way_out_begins_or_the_engine_is_replaced(replaced: bool) -> None:
    router, engines = routed(2)
    await turn(router, 2, [3] * 20, 3)
    task = asyncio.create_task(turn(router, 1, [1] * 20, 50))
    await begun(engines)
    here = home_of(router, 1)
    for phase in AT_GATEWAY[:3]:
        await router.phase(here, phase, 5.0)
    assert router.counts()["held"] == 1
    if replaced:
        router.set_route(here, EngineAddress("vllm", str(here), 9, 4096, "nixl"))
        router.open(here)
    else:
        await router.close(here, 5.0, hand_over=False)
    assert await asyncio.wait_for(task, 5.0) == undisturbed([1] * 20, 50)
    assert not any(engine.pulled for engine in engines), "of an engine that is gone, or of weights that change, nothing is taken over"
    await router.aclose()


def test_what_the_engines_of_a_cell_handed_over_adds_up() -> None:
    one = {"calls": 1, "doubts": {"late": 1}, "phases": {"pin": 0.2}, "seconds": 0.4}
    two = {"calls": 2, "doubts": {}, "phases": {"pin": 0.1}, "seconds": 0.6}
    assert added([one, two]) == {"calls": 3, "doubts": {"late": 1}, "phases": {"pin": 0.2}, "seconds": 0.6}
    assert added([]) == {}
