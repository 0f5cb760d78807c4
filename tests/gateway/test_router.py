"""Cells open and close, with all of their engines; what their calls see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre_hpc.engines.factory import connect, link
from gyre_hpc.engines.protocol import EngineAddress, EngineFault
from gyre_hpc.gateway.router import Router
from tests.gateway.scripted import ScriptedEngine, call, collect, scripted, settle


async def test_without_a_route_calls_are_held_until_one_opens() -> None:
    router, (engine,) = scripted([4])
    await router.close(0, 1.0)
    task = asyncio.create_task(collect(router, call("held"), 0))
    await settle()
    assert (router.counts()["held"], engine.served) == (1, [])
    gone = asyncio.create_task(collect(router, call("gone"), 1))
    await settle()
    gone.cancel()
    await settle()
    assert router.counts()["held"] == 1
    router.open(0)
    assert (await task)[0] == [0, 1, 2, 3, 4]
    assert engine.served == ["held"]
    assert await router.close(17, 1.0) == {"moved": 0, "held": 0, "seconds": 0.0}
    with pytest.raises(KeyError):
        router.open(17)


async def test_close_says_so_when_an_engine_does_not_let_go() -> None:
    router, (engine,) = scripted([4])
    engine.tick.clear()
    task = asyncio.create_task(collect(router, call("x"), 0))
    await settle()
    engine.slow_cancel = 0.3
    with pytest.raises(TimeoutError, match="cell 0: 1 calls still there"):
        await router.close(0, 0.05)
    engine.slow_cancel = 0.0
    engine.tick.set()
    async with asyncio.timeout(30):
        while (router.counts()["in_flight"], router.counts()["held"]) != (0, 1):
            await asyncio.sleep(0.01)
    router.open(0)
    assert (await task)[0] == [0, 1, 2, 3, 4]


async def test_the_end_fails_what_is_left() -> None:
    router, (engine,) = scripted([1])
    engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(f"x{i}"), i)) for i in range(2)]
    await settle()
    await router.aclose()
    for task in tasks:
        with pytest.raises(EngineFault, match="gateway stops"):
            await task


def test_the_default_connector_is_the_factory() -> None:
    assert Router.__init__.__defaults__ == (8, 0.2, connect, link)


async def test_a_cell_of_two_engines_opens_and_closes_as_one() -> None:
    router, engines = scripted([])
    engines += [ScriptedEngine() for _ in range(3)]
    for number, (cell, index) in enumerate([(0, 0), (1, 0), (1, 1)]):
        router.set_route(cell, EngineAddress("scripted", str(number), 2, 100), index)
    router.open(1)
    for engine in engines:
        engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(str(i)), i)) for i in range(4)]
    await settle()
    assert [len(engine.live) for engine in engines] == [0, 2, 2], "the emptier of a cell's engines takes what comes"
    assert router.counts()["cells"][1] == {  # type: ignore[index]
        "open": True,
        "engines": 2,
        "in_flight": 4,
        "executions": 4,
        "homes": 4,
        "capacity": 4,
        "tokens": 0,
    }
    router.open(0)
    answer = await router.close(1, 1.0)
    assert (answer["moved"], answer["held"]) == (2, 2), "the other cell holds two; none went to the closing cell's other engine"
    assert [len(engine.live) for engine in engines] == [2, 0, 0]
    assert {len(engine.served) for engine in engines[1:]} == {2}
    router.open(1)
    for engine in engines:
        engine.tick.set()
    assert [tokens for tokens, _, _ in await asyncio.gather(*tasks)] == [list(range(5))] * 4
    router.set_route(1, None, 1)
    assert router.counts()["cells"][1]["engines"] == 1  # type: ignore[index]
    await router.aclose()


async def two_busy_cells(calls: int) -> tuple[Router, list[ScriptedEngine], list[asyncio.Task[Any]]]:
    """Two open cells whose engines stand still, with `calls` under way."""
    router, engines = scripted([])
    engines += [ScriptedEngine() for _ in range(2)]
    for cell in range(2):
        router.set_route(cell, EngineAddress("scripted", str(cell), 4, 100))
        router.open(cell)
        engines[cell].tick.clear()
    tasks = [asyncio.create_task(collect(router, call(str(i)), i)) for i in range(calls)]
    await settle()
    return router, engines, tasks


@pytest.mark.parametrize("together", [True, False])
async def test_cells_that_close_together_give_one_another_nothing(together: bool) -> None:
    """One by one, calls of the first go to the second, are computed there, and are given up a second time."""
    router, engines, tasks = await two_busy_cells(4)
    assert [len(engine.served) for engine in engines] == [2, 2]
    if together:
        closed = await router.close_together([0, 1, 7], 5.0)
        assert (closed["moved"], closed["held"], closed["seconds"] > 0) == (0, 4, True)
        assert [len(engine.served) for engine in engines] == [2, 2]
    else:
        assert (await router.close(0, 5.0, False))["moved"] == 2
        assert (await router.close(1, 5.0, False))["held"] == 4
        assert [len(engine.served) for engine in engines] == [2, 4]
    for cell in range(2):
        engines[cell].tick.set()
        router.open(cell)
    assert [(await task)[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 4
    assert await router.close_together([7], 5.0) == {"moved": 0, "held": 0, "seconds": 0.0}


async def test_one_that_does_not_let_go_in_time_fails_all() -> None:
    router, engines, tasks = await two_busy_cells(2)
    engines[1].slow_cancel = 0.3
    with pytest.raises(TimeoutError, match="cell 1: 1 calls still there"):
        await router.close_together([0, 1], 0.05)
    assert [router.counts()["cells"][cell]["open"] for cell in range(2)] == [False, False]  # type: ignore[index]
    engines[1].slow_cancel = 0.0
    for cell in range(2):
        engines[cell].tick.set()
        router.open(cell)
    assert [(await task)[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 2
