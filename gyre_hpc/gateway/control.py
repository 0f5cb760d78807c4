"""The control API: what the controller, the driver and the supervisors ask of the gateway (docs/architecture.md).

Invariants: only the bearer of the run's secret is heard (bearer.py, errors too); what is answered is durable; every call may be repeated (a
client that lost its connection does so).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

from aiohttp import web
from pydantic import Field

from gyre_hpc.engines.protocol import EngineAddress
from gyre_hpc.gateway.bearer import Bearer, Body, Handler, Refused, json_answer, number, read_body
from gyre_hpc.gateway.ledger import Ledger
from gyre_hpc.gateway.places import NODE, UNDELIVERED
from trees.records import Group

LONGEST_POLL = 60.0
FAULT = "fault"
_BY_ITSELF = frozenset({"finished", "exit"})
"""Reasons of an end that a harness comes to by itself."""


class Routes(Protocol):
    """What the control API needs of the router."""

    def set_route(self, cell: int, address: EngineAddress | None, engine: int = 0) -> None: ...
    def open(self, cell: int) -> None: ...
    async def close(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, Any]: ...
    async def close_together(self, cells: Sequence[int], deadline: float) -> dict[str, Any]: ...
    async def phase(self, cell: int, phase: str, deadline: float, undo: bool = False) -> dict[str, Any]: ...
    def forget(self, execution: int) -> None: ...
    def counts(self) -> dict[str, object]: ...


class Calls(Protocol):
    """What it needs of the recorder: end an execution's calls and say (calls, tokens); whether its last call broke on our side."""

    def faulted(self, execution: int) -> bool: ...
    async def finish(self, execution: int) -> tuple[int, int]: ...


class _NewGroup(Body):
    group: int = Field(ge=0)
    task: str
    size: int = Field(ge=1)
    version: int = Field(ge=0)
    burst: int = Field(ge=0)


class _Dispatch(Body):
    groups: list[_NewGroup]


class _Work(Body):
    node: str = Field(min_length=1)
    slots: int = Field(ge=0)
    wait: float = Field(default=0.0, ge=0.0)
    have: list[int] | None = None


class _End(Body):
    reason: str = Field(min_length=1)
    score: float = Field(ge=0.0, le=1.0)
    valid: bool
    seconds: float = Field(ge=0.0)
    detail: str = ""


class _Lost(Body):
    reason: str = Field(min_length=1)
    detail: str = ""


class _Changes(Body):
    after: int = Field(ge=0)
    wait: float = Field(default=0.0, ge=0.0)


class _Frontier(Body):
    first: int = Field(default=0, ge=0)


class _Route(Body):
    cell: int = Field(ge=0)
    engine: int = Field(default=0, ge=0, lt=1024)
    address: dict[str, Any] | None


class _Close(Body):
    deadline: float = Field(gt=0.0)
    hand_over: bool = True


class _CloseTogether(Body):
    cells: list[int]
    deadline: float = Field(gt=0.0)


class _Phase(Body):
    phase: Literal["unroute", "reserve", "hold", "hand-over", "acknowledge"]
    deadline: float = Field(gt=0.0)
    undo: bool = False


class ControlApi:
    """Handlers of the control API. `commit` returns when all that was appended to the store is durable."""

    def __init__(self, ledger: Ledger, router: Routes, calls: Calls, secret: str, commit: Callable[[], Awaitable[None]]) -> None:
        self._ledger, self._router, self._calls, self._commit = ledger, router, calls, commit
        self._bearer = Bearer(secret)
        self._news = asyncio.Event()
        self._stopping = False
        self._waiting = 0
        """Questions for work that wait now."""

    def routes(self) -> list[web.RouteDef]:
        """All routes of the control API."""
        table: list[tuple[str, Handler]] = [
            ("/control/groups", self.dispatch),
            ("/control/work", self.work),
            ("/control/executions/{id}/end", self.end),
            ("/control/executions/{id}/lost", self.lost),
            ("/control/nodes/{node}/gone", self.gone),
            ("/control/changes", self.changes),
            ("/control/ledger", self.frontier),
            ("/control/routes", self.set_route),
            ("/control/routes/close", self.close_routes),
            ("/control/routes/{cell}/open", self.open_route),
            ("/control/routes/{cell}/close", self.close_route),
            ("/control/routes/{cell}/phase", self.phase),
        ]
        return [
            web.get("/control/status", self._bearer.guarded(self.status)),
            *(web.post(path, self._bearer.guarded(h)) for path, h in table),
        ]

    def stop(self) -> None:
        """Polls that wait are answered now, and none waits any more."""
        self._stopping = True
        self._news.set()

    # -- groups and executions ----------------------------------------------------------------------------------------------------

    async def dispatch(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Dispatch)
        self._ledger.dispatch(Group(g.group, g.task, g.size, g.version, g.burst) for g in body.groups)
        await self._durable()
        return json_answer({"groups": len(body.groups)})

    async def work(self, request: web.Request) -> web.Response:
        """Hands out only what reaches the supervisor: an answer that nobody is there to take is taken back.

        A new dispatch is shared by the nodes that wait for it; the first to be served would take all.
        """
        body = await read_body(request, _Work)
        items: list[dict[str, Any]] = []

        def ready() -> bool:
            if not _gone(request) and not items:
                share = -(-self._ledger.counts()["queued"] // self._waiting)
                items.extend(self._ledger.work(body.node, min(body.slots, share), body.have))
            return bool(items) or _gone(request) or body.slots == 0

        self._waiting += 1
        try:
            await self._until(ready, body.wait)
        finally:
            self._waiting -= 1
        if items:
            await self._durable()
            if _gone(request):
                for item in items:
                    self._ledger.lost(item["execution"], UNDELIVERED, f"node {body.node} did not take it")
                await self._durable()
        return json_answer(items)

    async def end(self, request: web.Request) -> web.Response:
        execution, body = _execution(request), await read_body(request, _End)
        ours = body.reason in _BY_ITSELF and self._calls.faulted(execution)
        calls, tokens = await self._release(execution)
        if ours:  # most harnesses can't say why they gave up, and some end with 0
            taken = self._ledger.lost(execution, FAULT, f"{body.reason} behind a call that broke: {body.detail}", calls, tokens)
        else:
            taken = self._ledger.end(execution, body.reason, body.score, body.valid, body.seconds, body.detail, calls, tokens)
        await self._durable()
        return json_answer({"accepted": taken, "calls": calls, "tokens": tokens})

    async def lost(self, request: web.Request) -> web.Response:
        execution, body = _execution(request), await read_body(request, _Lost)
        calls, tokens = await self._release(execution)
        taken = self._ledger.lost(execution, body.reason, body.detail, calls, tokens)
        await self._durable()
        return json_answer({"accepted": taken})

    async def gone(self, request: web.Request) -> web.Response:
        node = request.match_info["node"]
        executions = self._ledger.on_node(node)
        usage = await asyncio.gather(*(self._release(execution) for execution in executions))
        for execution, (calls, tokens) in zip(executions, usage, strict=True):
            self._ledger.lost(execution, NODE, f"node {node} is gone", calls, tokens)
        await self._durable()
        return json_answer({"lost": executions})

    async def changes(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Changes)
        log = self._ledger.changes
        await self._until(lambda: log.last > body.after or _gone(request), body.wait)
        found = log.after(body.after)
        return json_answer({"next": found[-1]["seq"] if found else body.after, "changes": found})

    async def frontier(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Frontier)
        await self._durable()
        return json_answer(self._ledger.frontier(body.first))

    # -- routes -------------------------------------------------------------------------------------------------------------------

    async def set_route(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Route)
        try:
            address = EngineAddress(**body.address) if body.address is not None else None
        except TypeError as error:
            raise Refused(400, f"address of cell {body.cell}: {error}") from None
        self._router.set_route(body.cell, address, body.engine)
        return json_answer({"cell": body.cell, "engine": body.engine})

    async def open_route(self, request: web.Request) -> web.Response:
        cell = number(request, "cell")
        try:
            self._router.open(cell)
        except KeyError:
            raise Refused(404, f"cell {cell} has no route") from None
        return json_answer({"cell": cell})

    async def close_route(self, request: web.Request) -> web.Response:
        body = await read_body(request, _Close)
        try:
            return json_answer(await self._router.close(number(request, "cell"), body.deadline, body.hand_over))
        except TimeoutError as error:
            raise Refused(504, str(error)) from None

    async def close_routes(self, request: web.Request) -> web.Response:
        body = await read_body(request, _CloseTogether)
        try:
            return json_answer(await self._router.close_together(body.cells, body.deadline))
        except TimeoutError as error:
            raise Refused(504, str(error)) from None

    async def phase(self, request: web.Request) -> web.Response:
        """One phase of a cell's way out of rollout, or its undo; 409 where it did not succeed: its undo is asked for next."""
        body = await read_body(request, _Phase)
        try:
            return json_answer(await self._router.phase(number(request, "cell"), body.phase, body.deadline, body.undo))
        except (TimeoutError, KeyError) as error:
            raise Refused(409, str(error)) from None

    async def status(self, request: web.Request) -> web.Response:
        return json_answer({**self._router.counts(), **self._ledger.counts()})

    # -- inside -------------------------------------------------------------------------------------------------------------------

    async def _release(self, execution: int) -> tuple[int, int]:
        """Nothing of this execution is in flight any more; its (calls, tokens)."""
        usage = await self._calls.finish(execution)
        self._router.forget(execution)
        return usage

    async def _durable(self) -> None:
        """All that the ledger did so far is on the disk, then told to those who wait."""
        mark = self._ledger.changes.mark()
        await self._commit()
        if self._ledger.changes.publish(mark):
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def _until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Returns when `ready` says so, or after `seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(seconds, LONGEST_POLL)
        while True:
            news = self._news
            if ready() or self._stopping or (left := until - loop.time()) <= 0:
                return
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                continue


def _execution(request: web.Request) -> int:
    return number(request, "id")


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
