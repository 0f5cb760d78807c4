"""Places: an engine's capacity, the order of who waits, and where an execution lives."""

from __future__ import annotations

import asyncio

from tests.gateway.scripted import call, collect, scripted, settle


async def test_capacity_counts_executions_and_the_rest_waits_in_order() -> None:
    router, (engine,) = scripted([2])
    engine.tick.clear()
    tasks = [asyncio.create_task(collect(router, call(f"e{e}.{k}"), e)) for e, k in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1))]
    await settle()
    assert engine.served == ["e0.0", "e1.0", "e0.1"]
    assert (router.counts()["in_flight"], router.counts()["held"]) == (3, 2)
    assert router.counts()["cells"][0]["executions"] == 2  # type: ignore[index]
    engine.tick.set()
    assert [len((await task)[0]) for task in tasks] == [5] * 5
    assert engine.served[3:] == ["e2.0", "e3.0"]
    assert engine.most == 3


async def test_an_execution_stays_while_it_can_and_moves_to_the_last_cell() -> None:
    router, engines = scripted([4, 4, 4])
    for execution in range(6):
        await collect(router, call(f"first{execution}"), execution)
    assert [len(e.served) for e in engines] == [2, 2, 2]
    for execution in range(6):
        await collect(router, call(f"second{execution}"), execution)
    for engine in engines:
        assert [name.removeprefix("second") for name in engine.served[2:]] == [name.removeprefix("first") for name in engine.served[:2]]
    for engine in engines:
        engine.tick.clear()
        engine.served.clear()
    tasks = [asyncio.create_task(collect(router, call(f"third{execution}"), execution)) for execution in range(6)]
    await settle()
    assert await router.close(0, 1.0) | {"seconds": 0} == {"moved": 2, "held": 0, "seconds": 0}
    await settle()
    assert [len(e.live) for e in engines] == [0, 2, 4]
    assert await router.close(2, 1.0) | {"seconds": 0} == {"moved": 2, "held": 2, "seconds": 0}
    router.open(0)
    for engine in engines:
        engine.tick.set()
    assert [(await task)[0] for task in tasks] == [[0, 1, 2, 3, 4]] * 6
    for execution in range(6):
        router.forget(execution)
    assert all(cell["homes"] == 0 for cell in router.counts()["cells"].values())  # type: ignore[attr-defined]
