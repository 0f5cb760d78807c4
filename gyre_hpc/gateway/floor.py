"""Where executions live, what runs on which engine, and who waits for a place.

Invariants:
- an engine never has calls of more executions than its capacity in flight; who finds no room waits in the order of arrival;
- concurrent calls of one execution go to one engine and count once. An execution stays with its engine (its prefix cache) while that
  is open and has room. A new one goes to the emptiest engine relative to capacity; one that was moved goes to the last open cell with
  room, for later cells stay in rollout longest (qwengyre.md 2.4);
- nothing is placed on a route that is closed, or that cools down after a fault; whatever frees a place places who waits.
One event loop calls everything; time comes from it.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import Counter

from gyre_hpc.engines.handover_waiting import WaitingConversations
from gyre_hpc.gateway.route import SEATS, Call, Route

log = logging.getLogger(__name__)

_COOL_DOWN_MAX = 5.0
_HELD_LOG = 30.0
"""Seconds between the log lines of a held call. A hold has no deadline of its own: the execution's budgets and the run's end it."""


class Floor:
    """All routes, by seat, and the calls on them or before them."""

    def __init__(self, cool_down: float) -> None:
        """`cool_down`: seconds without new calls after an engine's first fault in a row; doubles with each, up to 5 s."""
        self._cool_down = cool_down
        self.routes: dict[int, Route] = {}
        self.home: dict[int, int] = {}
        """Execution -> the seat where it lives."""
        self.waiting: list[Call] = []
        self.conversations = WaitingConversations()
        self.tokens = 0
        """Sampled so far, also by engines that are gone."""
        self._wake: asyncio.TimerHandle | None = None

    def of(self, cell: int) -> list[Route]:
        """A cell's routes, by engine."""
        return [route for _, route in sorted(self.routes.items()) if route.cell == cell]

    def cell_of(self, execution: int) -> int | None:
        """Where an execution lives."""
        seat = self.home.get(execution)
        return None if seat is None else seat // SEATS

    def counts(self) -> dict[str, object]:
        """{in_flight, held, tokens, cells: {cell: {open, engines, in_flight, executions, homes, capacity, tokens}}}.

        `executions` have calls in flight there, `homes` live there.
        """
        homes = Counter(seat // SEATS for seat in self.home.values())
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
            for cell in sorted({r.cell for r in self.routes.values()})
            if (of_cell := self.of(cell))
        }
        return {
            "in_flight": sum(len(r.calls) for r in self.routes.values()),
            "held": len(self.waiting),
            "tokens": self.tokens,
            "cells": cells,
        }

    # -- places -------------------------------------------------------------------------------------------------------------------

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
        return max((r for r in free if r.link is not None or not linked), key=lambda r: (r.cell, -r.load(homes), r.seat), default=None)

    def _usable(self) -> dict[int, Route]:
        now = asyncio.get_running_loop().time()
        return {seat: r for seat, r in self.routes.items() if r.open and r.not_before <= now}

    async def place(self, call: Call) -> Route:
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
                self.left(call, call.route)
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
            return max(free.values(), key=lambda r: (r.cell, -r.load(homes), r.seat))
        return min(free.values(), key=lambda r: (r.load(homes), -r.seat))

    def left(self, call: Call, route: Route) -> None:
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

    # -- routes that close or fail ------------------------------------------------------------------------------------------------

    def shut(self, route: Route) -> None:
        """Nobody lives there any more, and what runs there is cancelled."""
        route.open = False
        for execution, seat in list(self.home.items()):
            if seat == route.seat:
                del self.home[execution]
        for call in route.calls:
            if call.attempt is not None:
                call.attempt.cancel()

    @staticmethod
    async def emptied(route: Route) -> None:
        """Waits until nothing of ours runs there."""
        while route.calls:
            route.idle.clear()
            await route.idle.wait()

    def cool(self, route: Route) -> None:
        """An engine's fault: for a while nothing new goes there. What fails all its calls at once is one fault."""
        now = asyncio.get_running_loop().time()
        if now >= route.not_before:
            route.faults += 1
            route.not_before = now + min(self._cool_down * 2.0 ** (route.faults - 1), _COOL_DOWN_MAX)

    def _wake_after_cool_down(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        loop = asyncio.get_running_loop()
        later = [r.not_before for r in self.routes.values() if r.open and r.not_before > loop.time()]
        if later and self.waiting:
            self._wake = loop.call_at(min(later) + 0.001, self.dispatch)

    def rest(self) -> None:
        """The end: no timer is left."""
        if self._wake is not None:
            self._wake.cancel()
