"""A cell's way out of rollout at the gateway: unroute, reserve, hold, hand over, acknowledge (cells/transfer.py), each with its undo.

Ordering key: those phases; whoever drives them waits for one before it asks for the next. Each may be asked for again (an answer was
lost) and then changes nothing. Invariants: a call's tokens stay at the gateway whatever happens, so what is given up is computed again and
never lost; an engine is given no more executions than it has places when places are reserved; `acknowledge` answers when each piece of KV
has arrived elsewhere or was given up, and nobody pulls from the source any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from gyre_hpc.engines.handover import Departure
from gyre_hpc.engines.handover_waiting import Conversation
from gyre_hpc.gateway.floor import Floor
from gyre_hpc.gateway.route import Call, Route

log = logging.getLogger(__name__)
_LOOK = 0.02
"""Seconds between two looks for places that come free."""


class Leaving:
    """From `unroute`, which is its constructor, until the cell's routes open again."""

    def __init__(self, floor: Floor, cell: int, routes: list[Route], hand_over: bool) -> None:
        """`hand_over` False: KV is of no use elsewhere, for the weights change."""
        self.cell, self.hands_over = cell, hand_over
        self._floor, self._routes = floor, routes
        self._seats = {route.seat for route in routes}
        self._departures: dict[Route, Departure] = {}
        for route in routes:  # none of them takes what another one gives up
            route.open, route.draining = False, True
            if hand_over and route.link is not None:
                self._departures[route] = route.departure = Departure(route.link)
        homes = {execution for execution, seat in floor.home.items() if seat in self._seats}
        self.living = homes.union(*(route.executions for route in routes))
        self._reserved: dict[int, tuple[int, int]] = {}
        """Execution -> (its place elsewhere, where it lived here)."""
        self._calls: list[Call] | None = None
        self._owed = {"calls": 0, "conversations": 0}
        self._waiting: list[tuple[Route, Conversation]] = []
        self._arriving: list[asyncio.Future[object]] | None = None
        self._ended: asyncio.Task[dict[str, Any]] | None = None
        self._began = asyncio.get_running_loop().time()
        self._counts = {"moved": 0, "held": 0}

    async def phase(self, name: str, deadline: float) -> dict[str, Any]:
        """A phase by its name in cells/transfer.py; its deadline in seconds. Raises KeyError for one that is none of the gateway's."""
        match name:
            case "unroute":
                return dict(self.left())
            case "reserve":
                return dict(await self.reserve(deadline))
            case "hold":
                return dict(await self.hold(deadline))
            case "hand-over":
                return dict(self.hand_over())
            case "acknowledge":
                return await self.acknowledge(deadline)
        raise KeyError(f"no phase {name}")

    async def back(self, name: str) -> dict[str, Any]:
        """A phase's undo by the phase's name; that of `unroute` is to open the routes again, which is not done here."""
        match name:
            case "reserve":
                self.unreserve()
            case "hold":
                self.unhold()
            case "hand-over" | "acknowledge":
                await self.give_up()
            case _:
                raise KeyError(f"no phase {name}")
        return {}

    # -- the phases ---------------------------------------------------------------------------------------------------------------

    def left(self) -> dict[str, int]:
        """After unroute: {executions} that live there."""
        return {"executions": len(self.living)}

    async def reserve(self, patience: float) -> dict[str, int]:
        """A place elsewhere for each, waiting up to `patience` seconds for one to come free: {executions, placed}."""
        until = asyncio.get_running_loop().time() + patience
        while True:
            for execution in self._without_place():
                route = self._floor.place_for(execution)
                if route is None:
                    break
                self._reserved[execution] = (route.seat, self._floor.home[execution])
                self._floor.home[execution] = route.seat
            short = len(self._without_place())
            if not short or asyncio.get_running_loop().time() >= until:
                return {"executions": len(self.living), "placed": len(self.living) - short}
            await asyncio.sleep(_LOOK)

    async def hold(self, deadline: float) -> dict[str, int]:
        """Cancel what is in flight there; it waits: {calls, conversations} of which the source has KV. Raises TimeoutError, undone."""
        if self._calls is None:
            self._calls = [call for route in self._routes for call in route.calls]
            for call in self._calls:
                call.settled.clear()
                call.origin = call.origin if self.hands_over else None
                call.held = True
            for route in self._routes:
                route.draining = False
                here = self._floor.conversations.leave(route.seat)
                self._waiting += [(route, conversation) for conversation in here] if self.hands_over else []
                self._floor.shut(route)
            self._owed = {"calls": len(self._calls), "conversations": len(self._waiting)}
        try:
            async with asyncio.timeout(deadline):
                for route in self._routes:  # none of them fills again
                    await self._floor.emptied(route)
        except TimeoutError:
            left = sum(len(route.calls) for route in self._routes)
            self.unhold()
            raise TimeoutError(f"closing the route of cell {self.cell}: {left} calls still there after {deadline:.1f} s") from None
        return dict(self._owed)

    def hand_over(self) -> dict[str, int]:
        """What was held goes on where there is room, with its KV where that can travel: {moved, held}."""
        if self._arriving is None:
            calls = self._calls or []
            for call in calls:
                call.held = False
            self._floor.dispatch()
            self._counts = {
                "held": len(set(self._floor.waiting).intersection(calls)),
                "moved": sum(call.route is not None for call in calls),
            }
            work: list[Coroutine[None, None, object]] = []
            if self._departures:
                work += [call.settled.wait() for call in calls if call.route is not None]
                for route, conversation in self._waiting:
                    haven = self._floor.haven(conversation.execution)
                    if haven is not None:
                        work.append(self._bring(self._departures[route], conversation, haven))
            self._arriving = [asyncio.ensure_future(item) for item in work]
        return dict(self._counts)

    async def acknowledge(self, deadline: float) -> dict[str, Any]:
        """Nobody needs the source any more: {acknowledged, moved, held, seconds, handover?: Departure.report, of all engines}."""
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._acknowledged(deadline))
        return await asyncio.shield(self._ended)

    # -- undone -------------------------------------------------------------------------------------------------------------------

    def take_back(self) -> Coroutine[None, None, None]:
        """All of it, at once: nothing is held, and no KV is handed over any more. What is returned gives back what is pinned."""
        self._detach()
        self.unhold()
        return self.give_up()

    async def give_up(self) -> None:
        """What is on its way is computed again."""
        self._detach()
        on_their_way = [task for task in self._arriving or () if task.cancel()]
        if on_their_way:
            await asyncio.wait(on_their_way)  # what they had pinned is undone by then, or about to be
        await self._end_departures()

    def unhold(self) -> None:
        """What was held goes on wherever there is room; conversations that were not handed over still have their KV here."""
        for call in self._calls or ():
            call.held = False
        if self._ended is None:  # else their KV has gone elsewhere, or is gone
            for route, conversation in self._waiting:
                self._floor.conversations.end(conversation.execution, route.seat, conversation.tokens)
        self._waiting, self._calls = [], None
        self._floor.dispatch()

    def unreserve(self) -> None:
        """Who has a place elsewhere and has not used it lives here again."""
        busy = {call.execution for call in self._floor.waiting if not call.held}
        for execution, (there, here) in self._reserved.items():
            if self._floor.home.get(execution) == there and execution not in busy and not self._runs(execution):
                self._floor.home[execution] = here
        self._reserved = {}

    def forget(self, execution: int) -> None:
        """It has ended: its conversations need no KV, and it needs no place."""
        self._waiting = [(route, conversation) for route, conversation in self._waiting if conversation.execution != execution]
        self._reserved.pop(execution, None)

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _without_place(self) -> list[int]:
        here = {execution for execution, seat in self._floor.home.items() if seat in self._seats}
        return sorted(self.living & here)

    def _runs(self, execution: int) -> bool:
        """Whether calls of it that were here run elsewhere now."""
        return any(call.execution == execution and call.route is not None for call in self._calls or ())

    async def _bring(self, departure: Departure, conversation: Conversation, haven: Route) -> bool:
        arrived = await departure.bring(haven.client, haven.link, conversation.tokens)
        if arrived and self._floor.home.get(conversation.execution) == haven.seat:  # else it has ended or gone on meanwhile
            self._floor.conversations.end(conversation.execution, haven.seat, conversation.tokens)
        return arrived

    async def _acknowledged(self, deadline: float) -> dict[str, Any]:
        # half of what is left: pins that are given up last may still hold up what follows
        patience = min([deadline / 2.0, *(departure.patience for departure in self._departures.values())])
        pending = (await asyncio.wait(self._arriving, timeout=patience))[1] if self._arriving else set()
        if pending:
            log.warning("cell %d: %d hand-overs given up after %.1f s", self.cell, len(pending), patience)
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
        await self._end_departures()
        reports = [await departure.report() for departure in self._departures.values()]
        answer: dict[str, Any] = {"acknowledged": sum(self._owed.values()), **self._counts}
        if reports:
            answer["handover"] = added(reports)
        answer["seconds"] = seconds = asyncio.get_running_loop().time() - self._began
        counts = (self._counts["moved"], self._counts["held"], answer.get("handover", ""))
        log.info("route of cell %d closed in %.3f s: %d calls moved, %d held; %s", self.cell, seconds, *counts)
        return answer

    async def _end_departures(self) -> None:
        self._detach()
        for departure in self._departures.values():
            await departure.end()

    def _detach(self) -> None:
        """No call takes KV over from here any more."""
        for route, departure in self._departures.items():
            if route.departure is departure:
                route.departure = None


def added(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Reports of several engines key by key, nested ones likewise: counts are added, of seconds the longest stands."""
    whole: dict[str, Any] = {}
    for report in reports:
        for key, value in report.items():
            before = whole.get(key)
            if isinstance(value, dict):
                whole[key] = added([before or {}, value])
            else:
                whole[key] = value if before is None else max(before, value) if isinstance(value, float) else before + value
    return whole
