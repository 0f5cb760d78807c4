"""Routes of all cells: where their engines are, when they open, and how a cell's close is driven.

Invariants:
- a cell has a route for each of its engines; they open and close together, and of several the emptiest takes what comes to the cell;
- a route is closed until it is opened; `close` answers when nothing of ours runs there any more and, where the engines hand over KV
  (engines/handover.py), that of its calls and of conversations that wait for a tool has arrived elsewhere or was given up.
Who gets which engine: floor.py; how a call goes from one to the next: carriage.py; a cell's way out, phase by phase: leaving.py.
One event loop calls everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from gyre_hpc.engines.factory import connect, link
from gyre_hpc.engines.handover import KvLink
from gyre_hpc.engines.handover_waiting import WaitingConversations
from gyre_hpc.engines.protocol import EngineAddress, EngineClient, EngineFault, GenerateRequest, TokenChunk
from gyre_hpc.gateway.carriage import Carriage
from gyre_hpc.gateway.floor import Floor
from gyre_hpc.gateway.leaving import Leaving, added
from gyre_hpc.gateway.route import SEATS, Route

_NOTHING = {"moved": 0, "held": 0, "seconds": 0.0}


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
        self._connector = connector
        self._linker = linker
        self._floor = Floor(cool_down)
        self._carriage = Carriage(self._floor, faults)
        self._leaving: dict[int, Leaving] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def conversations(self) -> WaitingConversations:
        """Those that wait for a tool, and where their KV is."""
        return self._floor.conversations

    # -- routes -------------------------------------------------------------------------------------------------------------------

    def set_route(self, cell: int, address: EngineAddress | None, engine: int = 0) -> None:
        """Say where an engine of a cell is, closed at first; None: nowhere any more (calls on it move on). Same address: no change."""
        seat = cell * SEATS + engine
        old = self._floor.routes.get(seat)
        if old is not None and address == old.address:
            return
        if old is not None:
            del self._floor.routes[seat]
            ending = self._taken_back(cell)
            self._floor.conversations.leave(seat)
            self._floor.shut(old)
            self._spawn(self._close_client(old, ending))
        if address is not None:
            self._floor.routes[seat] = Route(seat, address, self._connector(address), self._linker(address))
        self._floor.dispatch()

    def open(self, cell: int) -> None:
        """Let new and held calls go to this cell's engines. Raises KeyError for a cell without a route."""
        routes = self._floor.of(cell)
        if not routes:
            raise KeyError(cell)
        for route in routes:
            route.open, route.draining, route.faults, route.not_before, route.departure = True, False, 0, 0.0, None
        if ending := self._taken_back(cell):
            self._spawn(ending)
        self._floor.dispatch()

    async def close(self, cell: int, deadline: float, hand_over: bool = True) -> dict[str, Any]:
        """All phases of leaving: admit nothing more, cancel what is in flight, continue it elsewhere or hold it until a route opens.

        Answers {moved, held, seconds} and, where KV was handed over, `handover` (Departure.report, added up over the cell's engines); a
        cell without a route has nothing to move. `hand_over` False: its KV is of no use elsewhere, for the weights change. Raises
        TimeoutError after `deadline` seconds (the routes stay closed).
        """
        if not self._floor.of(cell):
            return dict(_NOTHING)
        leaving = self.unroute(cell, hand_over)
        if hand_over:
            await leaving.reserve(0.0)
        await leaving.hold(deadline)
        leaving.hand_over()
        answer = await leaving.acknowledge(deadline)
        return {name: answer[name] for name in ("moved", "held", "handover", "seconds") if name in answer}

    async def close_together(self, cells: Sequence[int], deadline: float) -> dict[str, Any]:
        """Close cells for new weights: nothing moves from one to another that closes as well. {moved, held, seconds}, as `close` has them.

        One by one, what the first gave up would go to those that were still open, be computed there once more, and be given up
        again. Raises TimeoutError after `deadline` seconds (all routes stay closed).
        """
        leavings = [self.unroute(cell, False) for cell in cells if self._floor.of(cell)]
        for failed in await asyncio.gather(*(leaving.hold(deadline) for leaving in leavings), return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed
        for leaving in leavings:
            leaving.hand_over()
        answers = [await leaving.acknowledge(deadline) for leaving in leavings]
        whole = added(answers) if answers else {}
        return {name: whole.get(name, nothing) for name, nothing in _NOTHING.items()}

    def unroute(self, cell: int, hand_over: bool = True) -> Leaving:
        """Nothing new goes there; the way out, phase by phase (leaving.py). The same one until the routes open or an engine changes."""
        leaving = self._leaving.get(cell)
        if leaving is None or leaving.hands_over is not hand_over:
            if ending := self._taken_back(cell):
                self._spawn(ending)
            leaving = self._leaving[cell] = Leaving(self._floor, cell, self._floor.of(cell), hand_over)
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
            if self._floor.of(cell):
                self.open(cell)
            return {}
        leaving = self.unroute(cell) if phase == "unroute" and not undo else self._leaving.get(cell)
        if leaving is None:
            if undo:
                return {}
            raise KeyError(f"cell {cell} is not leaving: {phase} before unroute")
        return await leaving.back(phase) if undo else await leaving.phase(phase, deadline)

    # -- executions and calls -----------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one call, from whatever engines it takes; the last chunk has `finish`. Closing the iterator cancels the call.

        Raises RequestRefused at once, EngineFault after more than `faults` faults in a row.
        """
        return self._carriage.generate(request, execution)

    def forget(self, execution: int) -> None:
        """An execution has ended: it no longer counts where it lived, and nothing of it waits."""
        self._floor.conversations.forget(execution)
        self._floor.home.pop(execution, None)
        for leaving in self._leaving.values():
            leaving.forget(execution)

    def cell_of(self, execution: int) -> int | None:
        """Where an execution lives."""
        return self._floor.cell_of(execution)

    def counts(self) -> dict[str, object]:
        """{in_flight, held, tokens, cells: {cell: {open, engines, in_flight, executions, homes, capacity, tokens}}}.

        `executions` have calls in flight there, `homes` live there.
        """
        return self._floor.counts()

    # -- the end ------------------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Give up every route; calls still there fail."""
        for call in [*self._floor.waiting, *(call for route in self._floor.routes.values() for call in route.calls)]:
            call.output.put_nowait(EngineFault("the gateway stops"))
        for seat in list(self._floor.routes):
            self.set_route(seat // SEATS, None, seat % SEATS)
        self._floor.rest()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _close_client(self, route: Route, ending: Coroutine[None, None, None] | None = None) -> None:
        """`ending`: what still gives pins back over its link."""
        if ending is not None:
            await ending
        await self._floor.emptied(route)
        await route.client.close()
        if route.link is not None:
            await route.link.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
