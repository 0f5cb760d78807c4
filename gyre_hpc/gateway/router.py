"""Which engine serves a call, and how a call outlives engines.

Invariants:
- a call's tokens are kept here as they arrive, whoever reads them and however slowly; whatever ends a stream (a route that closes, an
  engine that dies), the call continues with prompt + tokens so far, so no token is lost, none comes twice, and max_tokens is exact;
- an engine never has calls of more executions than its capacity in flight; who finds no room waits in the order of arrival;
- concurrent calls of one execution go to one engine and count once. An execution stays with its engine (its prefix cache) while that
  is open and has room. A new one goes to the emptiest engine relative to capacity; one that was moved goes to the last open cell with
  room, for later cells stay in rollout longest (qwengyre.md 2.4);
- a cell has a route for each of its engines; they open and close together, and of several the emptiest takes what comes to the cell;
- a route is closed until it is opened; `close` answers when nothing of ours runs there any more and, where the engines hand over KV
  (engines/handover.py), that of its calls and of conversations that wait for a tool has arrived elsewhere or was given up.
One event loop calls everything; time comes from it. A cell's route carries no clock but the cool-down after a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.handover import Departure, KvLink, link
from gyre_hpc.engines.handover_waiting import WaitingConversations
from gyre_hpc.engines.prompt import extended
from gyre_hpc.engines.protocol import (
    EngineAddress,
    EngineClient,
    EngineFault,
    EngineUnreachable,
    GenerateRequest,
    Ids,
    RequestRefused,
    TokenChunk,
    merged,
)
from gyre_hpc.gateway.leaving import Leaving, load

log = logging.getLogger(__name__)

_COOL_DOWN_MAX = 5.0
_SEATS = 1024
"""Engines that one cell may have: a route's number is its cell times this, plus the engine's, so that later cells have higher ones."""
_HELD_LOG = 30.0
"""Seconds between the log lines of a held call. A hold has no deadline of its own: the execution's budgets and the run's end it."""


@dataclass(eq=False)
class Route:
    seat: int
    """Cell and engine in one number."""
    address: EngineAddress
    client: EngineClient
    link: KvLink | None
    open: bool = False
    draining: bool = False
    """Closed, and what is in flight still runs here."""
    calls: set[Call] = field(default_factory=set)
    executions: Counter[int] = field(default_factory=Counter)
    """Calls in flight here per execution; its size is what capacity limits."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0
    faults: int = 0
    """In a row, without a token in between."""
    not_before: float = 0.0
    departure: Departure | None = None
    """While it closes and its engine hands over KV."""

    @property
    def cell(self) -> int:
        return self.seat // _SEATS


@dataclass(eq=False)
class Call:
    request: GenerateRequest
    execution: int
    number: int
    """Order of arrival."""
    output: asyncio.Queue[TokenChunk | BaseException] = field(default_factory=asyncio.Queue)
    parts: list[Ids] = field(default_factory=list)
    """What was sampled, as it came."""
    sampled: int = 0
    """Tokens of all parts."""
    route: Route | None = None
    attempt: asyncio.Task[None] | None = None
    granted: asyncio.Future[Route] | None = None
    held: bool = False
    """It waits until its cell's KV may be handed over."""
    moving: bool = False
    """It has lost a route and continues elsewhere."""
    origin: Route | None = None
    """Whose engine has its KV: the last that sampled for it, or for what it goes on from."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Since its last route closed it has sampled elsewhere, or ended."""
    faults: int = 0

    def path(self) -> Sequence[int]:
        """The prompt, and what was sampled behind it."""
        return extended(self.request.prompt, np.concatenate(self.parts)) if self.parts else self.request.prompt


class Router:
    """Routes of all cells, and the calls on them."""

    def __init__(
        self,
        faults: int = 8,
        cool_down: float = 0.2,
        connector: Callable[[EngineAddress], EngineClient] = connect,
        linker: Callable[[EngineAddress], KvLink | None] = link,
    ) -> None:
        """`faults`: engine faults that one call survives in a row, without a token in between.

        `cool_down`: seconds without new calls after an engine's first fault in a row; doubles with each, up to 5 s.
        """
        self._faults = faults
        self._cool_down = cool_down
        self._connector = connector
        self._linker = linker
        self.conversations = WaitingConversations()
        self._routes: dict[int, Route] = {}
        self.home: dict[int, int] = {}
        self.waiting: list[Call] = []
        self._arrived = 0
        self._leaving: dict[int, Leaving] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._tokens = 0

    # routes

    def set_route(self, cell: int, address: EngineAddress | None, engine: int = 0) -> None:
        """Say where an engine of a cell is, closed at first; None: nowhere any more (calls on it move on). Same address: no change."""
        seat = cell * _SEATS + engine
        old = self._routes.get(seat)
        if old is not None and address == old.address:
            return
        if old is not None:
            del self._routes[seat]
            ending = self._taken_back(cell)
            self.conversations.leave(seat)
            self.shut(old)
            self._spawn(self._close_client(old, ending))
        if address is not None:
            self._routes[seat] = Route(seat, address, self._connector(address), self._linker(address))
        self.dispatch()

    def _of(self, cell: int) -> list[Route]:
        return [route for _, route in sorted(self._routes.items()) if route.cell == cell]

    def open(self, cell: int) -> None:
        """Let new and held calls go to this cell's engines. Raises KeyError for a cell without a route."""
        routes = self._of(cell)
        if not routes:
            raise KeyError(cell)
        for route in routes:
            route.open, route.draining, route.faults, route.not_before, route.departure = True, False, 0, 0.0, None
        if ending := self._taken_back(cell):
            self._spawn(ending)
        self.dispatch()

    async def close(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, Any]:
        """All phases of leaving: admit nothing more, cancel what is in flight, continue it elsewhere or hold it until a route opens.

        Answers {moved, held, seconds} and, where KV was handed over, `handover` (Departure.report, added up over the cell's engines); a
        cell without a route has nothing to move. `hand_over` False: its KV is of no use elsewhere, for the weights change. Raises
        TimeoutError after `deadline` seconds (the routes stay closed).
        """
        if not self._of(cell):
            return {"moved": 0, "held": 0, "seconds": 0.0}
        leaving = self.unroute(cell, hand_over)
        if hand_over:
            await leaving.reserve(0.0)
        await leaving.hold(deadline)
        leaving.hand_over()
        answer = await leaving.acknowledge(deadline)
        return {name: answer[name] for name in ("moved", "held", "handover", "seconds") if name in answer}

    def unroute(self, cell: int, hand_over: bool = True) -> Leaving:
        """Nothing new goes there; the way out, phase by phase (leaving.py). The same one until the routes open or an engine changes."""
        leaving = self._leaving.get(cell)
        if leaving is None or leaving.hands_over is not hand_over:
            if ending := self._taken_back(cell):
                self._spawn(ending)
            leaving = self._leaving[cell] = Leaving(self, cell, self._of(cell), hand_over)
        return leaving

    def _taken_back(self, cell: int) -> Coroutine[None, None, None] | None:
        """A cell's way out ends here, whatever follows: nobody else would let go of what it holds. What is left of it to wait for."""
        leaving = self._leaving.pop(cell, None)
        return None if leaving is None else leaving.take_back()

    async def phase(self, cell: int, phase: str, deadline: float, undo: bool = False) -> dict[str, Any]:
        """One phase of leaving, as named in cells/transfer.py, or its undo. TimeoutError; KeyError for a cell that is not leaving.

        A cell without a route leaves at once: nothing is there.
        """
        if phase == "unroute" and undo:
            if self._of(cell):
                self.open(cell)
            return {}
        leaving = self.unroute(cell) if phase == "unroute" and not undo else self._leaving.get(cell)
        if leaving is None:
            if undo:
                return {}
            raise KeyError(f"cell {cell} is not leaving: {phase} before unroute")
        match phase, undo:
            case "unroute", False:
                return dict(leaving.left())
            case "reserve", False:
                return dict(await leaving.reserve(deadline))
            case "hold", False:
                return dict(await leaving.hold(deadline))
            case "hand-over", False:
                return dict(leaving.hand_over())
            case "acknowledge", False:
                return await leaving.acknowledge(deadline)
            case "reserve", True:
                leaving.unreserve()
            case "hold", True:
                leaving.unhold()
            case "hand-over" | "acknowledge", True:
                await leaving.give_up()
            case _:
                raise KeyError(f"no phase {phase}")
        return {}

    def forget(self, execution: int) -> None:
        """An execution has ended: it no longer counts where it lived, and nothing of it waits."""
        self.conversations.forget(execution)
        self.home.pop(execution, None)
        for leaving in self._leaving.values():
            leaving.forget(execution)

    def cell_of(self, execution: int) -> int | None:
        """Where an execution lives."""
        seat = self.home.get(execution)
        return None if seat is None else seat // _SEATS

    def counts(self) -> dict[str, object]:
        """{in_flight, held, tokens, cells: {cell: {open, engines, in_flight, executions, homes, capacity, tokens}}}.

        `executions` have calls in flight there, `homes` live there.
        """
        homes = Counter(seat // _SEATS for seat in self.home.values())
        cells = {
            cell: {
                "open": all(r.open for r in of_cell),
                "engines": len(of_cell),
                "in_flight": sum(len(r.calls) for r in of_cell),
                "executions": sum(len(r.executions) for r in of_cell),
                "homes": homes[cell],
                "capacity": sum(r.address.capacity for r in of_cell),
                "tokens": sum(r.tokens for r in of_cell),
            }
            for cell in sorted({r.cell for r in self._routes.values()})
            if (of_cell := self._of(cell))
        }
        return {
            "in_flight": sum(len(r.calls) for r in self._routes.values()),
            "held": len(self.waiting),
            "tokens": self._tokens,
            "cells": cells,
        }

    async def aclose(self) -> None:
        """Give up every route; calls still there fail."""
        for call in [*self.waiting, *(call for route in self._routes.values() for call in route.calls)]:
            call.output.put_nowait(EngineFault("the gateway stops"))
        for seat in list(self._routes):
            self.set_route(seat // _SEATS, None, seat % _SEATS)
        if self._wake is not None:
            self._wake.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # calls

    async def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one call, from whatever engines it takes; the last chunk has `finish`. Closing the iterator cancels the call.

        Raises RequestRefused at once, EngineFault after more than `faults` faults in a row.
        """
        if request.sampling.max_tokens < 1:
            raise RequestRefused(f"max_tokens = {request.sampling.max_tokens}")
        call = Call(request, execution, self._arrived)
        self._arrived += 1
        known = self.conversations.begin(execution, request.prompt)
        call.origin = self._routes.get(known) if known is not None else None
        pump = asyncio.create_task(self._carry(call))
        try:
            while True:
                items = [await call.output.get()]
                while not call.output.empty():  # what has come meanwhile goes on in one piece: each costs its reader as much as 200 tokens
                    items.append(call.output.get_nowait())
                for item in merged(items):
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                    if item.finish is not None:
                        return
        finally:
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump

    async def _carry(self, call: Call) -> None:
        """Run attempts until the call is finished or given up; the outcome always reaches the reader."""
        try:
            while True:
                route = await self._place(call)
                if not route.open:  # it closed between the grant and now
                    self._left(call, route)
                    call.moving = True
                    continue
                call.attempt = asyncio.create_task(self._attempt(call, route))
                try:
                    await asyncio.wait([call.attempt])
                finally:
                    if not call.attempt.done():
                        call.attempt.cancel()
                        await asyncio.wait([call.attempt])
                    self._left(call, route)
                if call.attempt.cancelled():
                    call.moving = True
                    continue
                fault = call.attempt.exception()
                if fault is None:
                    return
                if not isinstance(fault, EngineFault) or isinstance(fault, RequestRefused):
                    raise fault
                if route.open and self._routes.get(route.seat) is route:
                    self._blame(route, call, fault)
                call.moving = True
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            call.output.put_nowait(error)
        finally:
            call.settled.set()
            origin = call.origin
            if origin is not None and origin.link is not None and (origin.open or origin.draining):
                self.conversations.end(call.execution, origin.seat, call.path())

    async def _attempt(self, call: Call, route: Route) -> None:
        """Stream from one engine until the call is finished. Cancelled when the route closes. Raises EngineFault."""
        base, done = call.request, call.sampled
        rest = replace(base.sampling, max_tokens=base.sampling.max_tokens - done)
        prompt = call.path()
        request = replace(base, prompt=prompt, sampling=rest, position=base.position + done)
        departure = call.origin.departure if call.origin is not None and call.origin is not route else None
        stream = route.client.generate(request) if departure is None else departure.stream(route.client, route.link, request)
        try:
            async for chunk in stream:
                call.origin = route
                call.settled.set()
                if count := len(chunk):
                    route.faults = call.faults = 0
                    route.tokens += count
                    self._tokens += count
                if self._accept(call, chunk):
                    return
            raise EngineFault("the engine's stream ended without a finish")
        finally:
            await stream.aclose()

    @staticmethod
    def _accept(call: Call, chunk: TokenChunk) -> bool:
        """Keep a chunk and pass it on; True when the call is finished, whether or not the engine was still able to say so."""
        limit, stop = call.request.sampling.max_tokens, call.request.sampling.stop
        if call.sampled + len(chunk) > limit:
            raise EngineFault(f"the engine sent more than the {limit} tokens it was asked for")
        call.parts.append(chunk.tokens)
        call.sampled += len(chunk)
        finish = chunk.finish
        if finish is None and len(chunk):
            finish = "stop" if int(chunk.tokens[-1]) in stop else "length" if call.sampled == limit else None
        call.output.put_nowait(chunk if finish == chunk.finish else replace(chunk, finish=finish))
        return finish is not None

    def _blame(self, route: Route, call: Call, fault: EngineFault) -> None:
        """Count a fault of an open route; raises it when the call has had enough. What fails all its calls at once is one fault.

        A call does not pay for an engine that is gone: another one comes to this cell, and the call's execution has its own deadline.
        """
        call.faults += not isinstance(fault, EngineUnreachable)
        now = asyncio.get_running_loop().time()
        if now >= route.not_before:
            route.faults += 1
            route.not_before = now + min(self._cool_down * 2.0 ** (route.faults - 1), _COOL_DOWN_MAX)
        log.warning("cell %d, call %s, fault %d of %d: %s", route.cell, call.request.request_id, call.faults, self._faults, fault)
        if call.faults > self._faults:
            raise fault

    def haven(self, execution: int) -> Route | None:
        """Where an execution that waits lives from now on: where its calls went, or the last open cell that has room for it."""
        home = self._usable().get(self.home.get(execution, -1))
        if home is None or home.link is None:
            home = self.place_for(execution, linked=True)
            if home is not None:
                self.home.setdefault(execution, home.seat)
        return home

    def place_for(self, execution: int, linked: bool = False) -> Route | None:
        """The last open cell with room for one more execution, of its engines the emptiest; `linked`: that can take KV over."""
        homes = Counter(self.home.values())
        free = [r for r in self._usable().values() if max(homes[r.seat], len(r.executions)) < r.address.capacity]
        return max((r for r in free if r.link is not None or not linked), key=lambda r: (r.cell, -load(r, homes), r.seat), default=None)

    def _usable(self) -> dict[int, Route]:
        now = asyncio.get_running_loop().time()
        return {seat: r for seat, r in self._routes.items() if r.open and r.not_before <= now}

    # placement

    async def _place(self, call: Call) -> Route:
        """Wait for room on an open engine; the call counts there when this returns."""
        call.granted = asyncio.get_running_loop().create_future()
        insort(self.waiting, call, key=lambda c: c.number)
        self.dispatch()
        if call.granted.done():
            return call.granted.result()
        if call.moving and not call.held:
            call.settled.set()  # its KV can arrive nowhere now: whoever leaves waits no longer for that
        waited = 0.0
        try:
            while not (await asyncio.wait([call.granted], timeout=_HELD_LOG))[0]:
                waited += _HELD_LOG
                log.warning("call %s held for %.0f s: no open engine has room", call.request.request_id, waited)
            return call.granted.result()
        except asyncio.CancelledError:
            if call in self.waiting:
                self.waiting.remove(call)
            if call.route is not None:
                self._left(call, call.route)
            raise

    def dispatch(self) -> None:
        """Place waiting calls in order. Only a call of an execution that is already on an engine may pass one that finds no room."""
        usable = self._usable()
        left: list[Call] = []
        full = False
        for call in self.waiting if usable else ():
            route = None if call.held else self._choose(call, usable, room=not full)
            if route is None:
                left.append(call)
                full = full or not call.held
                continue
            call.route = route
            route.calls.add(call)
            route.executions[call.execution] += 1
            route.idle.clear()
            self.home[call.execution] = route.seat
            if call.granted is not None and not call.granted.done():
                call.granted.set_result(route)
        if usable:
            self.waiting = left
        self._wake_after_cool_down()

    def _choose(self, call: Call, usable: dict[int, Route], room: bool) -> Route | None:
        home = usable.get(self.home.get(call.execution, -1))
        if home is not None and call.execution in home.executions:
            return home
        if not room:
            return None
        free = {seat: route for seat, route in usable.items() if len(route.executions) < route.address.capacity}
        if not free:
            return None
        if home is not None and home.seat in free:
            return home
        homes = Counter(self.home.values())
        if call.moving:
            return max(free.values(), key=lambda r: (r.cell, -load(r, homes), r.seat))
        return min(free.values(), key=lambda r: (load(r, homes), -r.seat))

    def _wake_after_cool_down(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        loop = asyncio.get_running_loop()
        later = [r.not_before for r in self._routes.values() if r.open and r.not_before > loop.time()]
        if later and self.waiting:
            self._wake = loop.call_at(min(later) + 0.001, self.dispatch)

    def _left(self, call: Call, route: Route) -> None:
        """A call no longer runs on a route: its place is free."""
        if call.route is not route:
            return
        call.route = None
        route.calls.discard(call)
        route.executions[call.execution] -= 1
        if not route.executions[call.execution]:
            del route.executions[call.execution]
        if not route.calls:
            route.idle.set()
        self.dispatch()

    def shut(self, route: Route) -> None:
        route.open = False
        for execution, seat in list(self.home.items()):
            if seat == route.seat:
                del self.home[execution]
        for call in route.calls:
            if call.attempt is not None:
                call.attempt.cancel()

    @staticmethod
    async def emptied(route: Route) -> None:
        while route.calls:
            route.idle.clear()
            await route.idle.wait()

    async def _close_client(self, route: Route, ending: Coroutine[None, None, None] | None = None) -> None:
        """`ending`: what still gives pins back over its link."""
        if ending is not None:
            await ending
        await self.emptied(route)
        await route.client.close()
        if route.link is not None:
            await route.link.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
