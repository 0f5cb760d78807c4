from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gyre_hpc.engines.protocol import EngineAddress
from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.gateway.client import ControlClient, PhaseFailed
from gyre_hpc.gateway.control import ControlApi
from gyre_hpc.gateway.ledger import Ledger
from gyre_hpc.gateway.pump import EventPump
from tests.ports import free_port
from trees.records import Group
from trees.store import StoreWriter

SECRET = "the-secret"
GROUP = {"group": 0, "task": "a", "size": 2, "version": 0, "burst": 0}


class FakeRouter:
    """In place of the engines: remembers what it is told."""

    def __init__(self) -> None:
        self.cells: dict[int, EngineAddress | None] = {}
        self.opened: list[int] = []
        self.forgotten: list[int] = []

    def set_route(self, cell: int, address: EngineAddress | None, engine: int = 0) -> None:
        self.cells[cell] = address

    def open(self, cell: int) -> None:
        if cell not in self.cells:
            raise KeyError(cell)
        self.opened.append(cell)

    async def close(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, float]:
        if deadline < 0.1:
            raise TimeoutError(f"closing the route of cell {cell}: 1 calls still there")
        return {"moved": 2, "held": 1, "seconds": 0.1}

    async def close_together(self, cells: Sequence[int], deadline: float) -> dict[str, float]:
        if deadline < 0.1:
            raise TimeoutError(f"closing the route of cell {cells[0]}: 1 calls still there")
        return {"moved": 0, "held": len(cells), "seconds": 0.2}

    async def phase(self, cell: int, phase: str, deadline: float, undo: bool = False) -> dict[str, Any]:
        if phase == "hold" and not undo:
            raise TimeoutError("1 calls still there")
        return {"undone": phase} if undo else {"executions": 3}

    def forget(self, execution: int) -> None:
        self.forgotten.append(execution)

    def counts(self) -> dict[str, object]:
        return {"in_flight": 1, "held": 0, "tokens": 7, "cells": {0: {"open": True}}}


class FakeCalls:
    """In place of the recorder: every execution made three calls."""

    def __init__(self) -> None:
        self.broken: set[int] = set()
        self.finished: list[int] = []

    def faulted(self, execution: int) -> bool:
        return execution in self.broken

    async def finish(self, execution: int) -> tuple[int, int]:
        self.finished.append(execution)
        await asyncio.sleep(0)
        return 3, 30


class Gateway:
    """The control API on a real store and a real socket; `hold` keeps commits from returning."""

    def __init__(self, folder: Path) -> None:
        self.store = StoreWriter(folder / "trees")
        self.events = folder / "events.jsonl"
        self.fatal: list[Exception] = []
        self.pump = EventPump(EventLog(self.events), self.fatal.append)
        self.ledger = Ledger(self.store, self.pump.emit, retries=1)
        self.router = FakeRouter()
        self.hold = asyncio.Event()
        self.hold.set()
        self.broken: Exception | None = None
        app = web.Application()
        self.calls = FakeCalls()
        self.api = ControlApi(self.ledger, self.router, self.calls, SECRET, self.commit)
        app.add_routes(self.api.routes())
        self.server = TestServer(app)

    async def commit(self) -> None:
        await self.hold.wait()
        if self.broken is not None:
            raise self.broken
        await asyncio.to_thread(self.store.commit)

    def connections(self) -> int:
        """Those that the server knows of."""
        assert self.server.runner is not None
        return len(self.server.runner.server.connections)

    @property
    def url(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    @property
    def client(self) -> ControlClient:
        return ControlClient(self.url, SECRET, deadline=2.0)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Gateway]:
    gate = Gateway(folder)
    await gate.server.start_server()
    try:
        yield gate
    finally:
        gate.hold.set()
        gate.api.stop()
        await gate.server.close()
        gate.pump.close()
        gate.store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def post(gate: Gateway, path: str, body: Any, secret: str = SECRET) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession() as session, session.post(gate.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_an_execution_from_dispatch_to_the_controllers_changes(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        client = gate.client
        await asyncio.to_thread(client.dispatch, [GROUP])
        await asyncio.to_thread(client.dispatch, [GROUP])
        status, items = await post(gate, "/control/work", {"node": "n1", "slots": 4, "wait": 0})
        assert (status, len(items)) == (200, 2)
        body = {"reason": "finished", "score": 0.5, "valid": True, "seconds": 2.0, "detail": ""}
        path = f"/control/executions/{items[0]['execution']}/end"
        assert await post(gate, path, body) == (200, {"accepted": True, "calls": 3, "tokens": 30})
        assert (await post(gate, path, body))[1]["accepted"] is False
        lost = f"/control/executions/{items[1]['execution']}/lost"
        assert await post(gate, lost, {"reason": "fault", "detail": "x"}) == (200, {"accepted": True})
        after, changes = await asyncio.to_thread(client.changes, 0)
        assert [change["kind"] for change in changes] == ["dispatched", "started", "started", "ended", "lost"]
        assert after == 5
        frontier = await asyncio.to_thread(client.ledger)
        assert frontier["groups"][0]["ends"] == [{"index": 0, "execution": 0, "score": 0.5, "valid": True, "reason": "finished"}]
        assert frontier["next"] == 5
        state = await asyncio.to_thread(client.status)
        assert (state["queued"], state["live"], state["finished"], state["lost"], state["tokens"]) == (1, 0, 1, 1, 7)
        assert gate.router.forgotten[:2] == [0, 0]
    assert [(e["kind"], e["execution"]) for e in read_events(tmp_path / "events.jsonl")] == [("execution.end", 0), ("execution.lost", 1)]
    assert gate.fatal == []


async def test_nothing_is_answered_or_told_before_it_is_durable(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        gate.hold.clear()
        dispatching = asyncio.create_task(post(gate, "/control/groups", {"groups": [GROUP]}))
        await asyncio.sleep(0.1)
        assert not dispatching.done()
        assert (await post(gate, "/control/changes", {"after": 0}))[1]["changes"] == []
        gate.hold.set()
        assert (await dispatching)[0] == 200
        assert len((await post(gate, "/control/changes", {"after": 0}))[1]["changes"]) == 1


async def test_polls_wake_up_when_there_is_something(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        work = asyncio.create_task(post(gate, "/control/work", {"node": "n1", "slots": 1, "wait": 20}))
        changes = asyncio.create_task(asyncio.to_thread(gate.client.changes, 0, 20.0))
        await asyncio.sleep(0.1)
        assert not work.done()
        assert not changes.done()
        await post(gate, "/control/groups", {"groups": [GROUP]})
        (_, items), (_, first) = await asyncio.wait_for(asyncio.gather(work, changes), 15)
        assert len(items) == 1
        assert first[0]["kind"] == "dispatched"
        waiting = asyncio.create_task(post(gate, "/control/changes", {"after": 99, "wait": 20}))
        await asyncio.sleep(0.1)
        gate.api.stop()
        assert (await asyncio.wait_for(waiting, 15))[1] == {"next": 99, "changes": []}


async def test_work_that_nobody_is_there_to_take_stays(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        asking = asyncio.create_task(post(gate, "/control/work", {"node": "n1", "slots": 2, "wait": 20}))
        await until(lambda: gate.api._waiting == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gate.connections() == 0)
        await post(gate, "/control/groups", {"groups": [GROUP]})
        await asyncio.sleep(0.05)
        assert gate.ledger.counts()["queued"] == 2
        # gone while the hand-out becomes durable: taken back, at no cost
        gate.hold.clear()
        asking = asyncio.create_task(post(gate, "/control/work", {"node": "n1", "slots": 2, "wait": 20}))
        await until(lambda: gate.ledger.counts()["live"] == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gate.connections() == 0)
        gate.hold.set()
        await until(lambda: gate.ledger.counts()["queued"] == 2)
        _, items = await post(gate, "/control/work", {"node": "n2", "slots": 2})
        assert [(item["attempt"], item["retries_left"]) for item in items] == [(1, 1), (1, 1)]


async def test_what_was_begun_goes_on_when_its_client_goes_away(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        await asyncio.to_thread(gate.client.dispatch, [GROUP])
        _, items = await post(gate, "/control/work", {"node": "n1", "slots": 1, "wait": 0})
        gate.hold.clear()
        body = {"reason": "finished", "score": 0.5, "valid": True, "seconds": 2.0}
        asking = asyncio.create_task(post(gate, f"/control/executions/{items[0]['execution']}/end", body))
        await until(lambda: bool(gate.calls.finished))
        asking.cancel()
        await until(lambda: gate.connections() == 0)
        assert [change["kind"] for change in gate.ledger.changes.after(0)] == ["dispatched", "started"], "not told before it is durable"
        gate.hold.set()
        async with asyncio.timeout(30):
            while [change["kind"] for change in gate.ledger.changes.after(0)][2:] != ["ended"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("reason", "kind"), [("exit", "lost"), ("finished", "lost"), ("timeout", "ended")])
async def test_an_end_behind_a_call_that_broke_is_ours(tmp_path: Path, reason: str, kind: str) -> None:
    """A harness that gives up because of us is never scored; one whose time was over had it."""
    async with gateway(tmp_path) as gate:
        gate.ledger.dispatch([Group(0, "t", 1, 0, 0)])
        given = gate.ledger.work("n", 1)[0]["execution"]
        gate.calls.broken.add(given)
        body = {"reason": reason, "score": 0.0, "valid": True, "seconds": 1.0, "detail": "API error"}
        assert (await post(gate, f"/control/executions/{given}/end", body))[0] == 200
        last = next(change for change in gate.ledger.changes.after(0) if change["kind"] in ("ended", "lost"))
        assert last["kind"] == kind
        assert kind == "ended" or last["reason"] == "fault"


async def test_nodes_that_wait_share_a_dispatch(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        nodes = ("n1", "n2", "n3")
        asking = [asyncio.create_task(post(gate, "/control/work", {"node": node, "slots": 64, "wait": 10})) for node in nodes]
        while gate.api._waiting < len(nodes):
            await asyncio.sleep(0.01)
        groups = [{**GROUP, "group": number, "size": 4} for number in range(2)]
        await asyncio.to_thread(gate.client.dispatch, groups)
        handed = [len((await task)[1]) for task in asking]
        assert sorted(handed) == [2, 3, 3]
        await asyncio.to_thread(gate.client.dispatch, [{**GROUP, "group": 2, "size": 4}])
        assert len((await post(gate, "/control/work", {"node": "n1", "slots": 64, "wait": 0}))[1]) == 4, "who is alone takes all"


async def test_a_node_that_is_gone_loses_what_it_had(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        client = gate.client
        await asyncio.to_thread(client.dispatch, [GROUP])
        await post(gate, "/control/work", {"node": "n1", "slots": 1})
        await post(gate, "/control/work", {"node": "n2", "slots": 1})
        assert await asyncio.to_thread(client.node_gone, "n1") == [0]
        assert await asyncio.to_thread(client.node_gone, "n1") == []
        assert gate.ledger.counts()["queued"] == 1


async def test_routes(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        client = gate.client
        address = EngineAddress("torch", "http://localhost:1", 8, 512)
        await asyncio.to_thread(client.set_route, 1, asdict(address))
        assert gate.router.cells == {1: address}
        await asyncio.to_thread(client.open_route, 1)
        assert gate.router.opened == [1]
        assert await asyncio.to_thread(client.close_route, 1, 5.0) == {"moved": 2, "held": 1, "seconds": 0.1}
        with pytest.raises(Resumable, match="1 calls still there"):
            await asyncio.to_thread(client.close_route, 1, 0.05)
        assert await asyncio.to_thread(client.close_routes, [1, 4], 5.0) == {"moved": 0, "held": 2, "seconds": 0.2}
        with pytest.raises(Resumable, match="1 calls still there"):
            await asyncio.to_thread(client.close_routes, [1, 4], 0.05)
        assert await asyncio.to_thread(client.phase, 1, "unroute", 5.0) == {"executions": 3}
        with pytest.raises(PhaseFailed, match="1 calls still there"):
            await asyncio.to_thread(client.phase, 1, "hold", 5.0)
        assert await asyncio.to_thread(client.phase, 1, "hold", 5.0, True) == {"undone": "hold"}
        with pytest.raises(GyreError, match="HTTP 404 cell 5 has no route"):
            await asyncio.to_thread(client.open_route, 5)
        with pytest.raises(GyreError, match="HTTP 400 address of cell 1"):
            await asyncio.to_thread(client.set_route, 1, {"nonsense": 1})
        await asyncio.to_thread(client.set_route, 1, None)
        assert gate.router.cells == {1: None}


@pytest.mark.parametrize(
    ("path", "body", "secret", "status", "error"),
    [
        ("/control/groups", {"groups": []}, "wrong", 401, "secret"),
        ("/control/status-of", {}, SECRET, 404, ""),
        ("/control/groups", {"groups": [{**GROUP, "size": 0}]}, SECRET, 400, "groups.0.size"),
        ("/control/groups", {"groups": [{**GROUP, "more": 1}]}, SECRET, 400, "groups.0.more"),
        ("/control/executions/77/lost", {"reason": "x"}, SECRET, 404, "no execution 77"),
        ("/control/executions/x/lost", {"reason": "x"}, SECRET, 404, "not a number"),
        ("/control/executions/0/end", {"reason": "x", "score": 2.0, "valid": True, "seconds": 0}, SECRET, 400, "score"),
    ],
)
async def test_mistakes_are_named(tmp_path: Path, path: str, body: Any, secret: str, status: int, error: str) -> None:
    async with gateway(tmp_path) as gate:
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession() as session, session.post(gate.url + path, json=body, headers=headers) as answer:
            assert answer.status == status
            assert error in await answer.text()


async def test_a_group_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        await post(gate, "/control/groups", {"groups": [GROUP]})
        status, answer = await post(gate, "/control/groups", {"groups": [{**GROUP, "task": "b"}]})
        assert status == 409
        assert "group 0 was dispatched" in answer["error"]


async def test_a_record_that_can_not_be_written_is_resumable(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        gate.broken = OSError(28, "No space left on device")
        with pytest.raises(Resumable, match="No space left"):
            await asyncio.to_thread(gate.client.dispatch, [GROUP])
        assert (await post(gate, "/control/changes", {"after": 0}))[1]["changes"] == []


async def test_the_client_survives_a_closed_connection_and_serves_several_threads(tmp_path: Path) -> None:
    async with gateway(tmp_path) as gate:
        client = gate.client
        await asyncio.to_thread(client.status)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                for _ in range(5):
                    client.status()
                    client._drop()
                    client.status()
                    client._local.connection.sock.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert errors == []


def test_a_gateway_that_is_not_there_is_resumable_after_the_deadline() -> None:
    client = ControlClient(f"http://127.0.0.1:{free_port()}", SECRET, deadline=0.3)
    with pytest.raises(Resumable, match=r"out of reach for 0\.3 s"):
        client.status()
