"""Engines that died while their cell serves: which, and how they come back.

Ordering key: one cell at a time, as an activity of the controller's, so never beside a transfer or a publication. Invariants: a cell that
is in training, or on its way back from there, is left alone: its return starts what is missing; one whose way out is decided but not begun
is kept until that is over, for it may be undone; an engine is what its pid says: one that has been started again meanwhile (a publication
does that, too) keeps its route and its calls; `dead` names an engine from the note of its death until its calls can go there again, so
that the policy counts on no slot that isn't there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from typing import Any

from cells.roles import CellState
from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command
from gyre_hpc.controller.transfers import set_routes
from gyre_hpc.errors import Resumable
from gyre_hpc.events import EventLog
from gyre_hpc.gateway.client import ControlClient


class Revival:
    """Hears of deaths, says which cell is next, and has its engines started."""

    def __init__(self, asking: Asking, client: ControlClient, events: EventLog, deadlines: DeadlinesSection, attempt: int) -> None:
        self._asking, self._client, self._events, self._deadlines, self._attempt = asking, client, events, deadlines, attempt
        self._died: dict[int, dict[int, int]] = {}
        """By cell: engine -> the pid that it had."""
        self._in_hand: tuple[int, frozenset[int]] | None = None
        """The cell that `run` is at, and its engines that died."""

    def hear(self, cell: int, died: Mapping[str, int]) -> None:
        """A cell's note: {engine: pid}."""
        dead = {int(engine): pid for engine, pid in died.items()}
        self._died.setdefault(cell, {}).update(dead)
        self._events.emit("engine.died", cell=cell, engines=sorted(dead), attempt=self._attempt)

    @property
    def cells(self) -> frozenset[int]:
        """Those with engines that died and nobody is at."""
        return frozenset(self._died)

    def dead(self, cell: int) -> Collection[int]:
        """Engines of a cell that don't serve."""
        in_hand = self._in_hand[1] if self._in_hand is not None and self._in_hand[0] == cell else frozenset()
        return in_hand.union(self._died.get(cell, ()))

    def due(self, state: Callable[[int], CellState]) -> int | None:
        """A cell in rollout with an engine that died; those of cells that train are forgotten. `state`: standalone ones are in rollout."""
        for cell in list(self._died):
            if state(cell) in (CellState.TRAINING, CellState.RETURNING):
                del self._died[cell]
        return next((cell for cell in self._died if state(cell) is CellState.ROLLOUT), None)

    def run(self, cell: int, version: int, weights: str) -> Generator[None, None, None]:
        """Its calls go on elsewhere, or wait; then the engines are back, with these weights, at other addresses. Raises Resumable."""
        dead = self._died.pop(cell)
        self._in_hand = (cell, frozenset(dead))
        yield from self._revive(cell, dead, version, weights)
        self._in_hand = None

    def _revive(self, cell: int, dead: Mapping[int, int], version: int, weights: str) -> Generator[None, None, None]:
        began = time.monotonic()
        where = yield from self._ask(cell, Command("where", version, weights, self._deadlines.transfer))
        dead = {engine: pid for engine, pid in dead.items() if where["engines"][str(engine)]["pid"] == pid}
        if not dead:
            return
        for engine in sorted(dead):
            yield from self._asking.call(partial(self._client.set_route, cell, None, engine))
        report = yield from self._ask(cell, Command("revive", version, weights, self._deadlines.start))
        yield from set_routes(self._asking, self._client, cell, report)
        yield from self._asking.call(partial(self._client.open_route, cell))
        seconds = round(time.monotonic() - began, 4)
        self._events.emit("engine.start", cell=cell, engines=sorted(dead), seconds=seconds, attempt=self._attempt)

    def _ask(self, cell: int, message: Command) -> Generator[None, None, dict[str, Any]]:
        limit = 1.5 * message.seconds
        report = yield from self._asking.ask(cell, message, f"an engine that died ({message.what})", limit)
        if report is None or "failed" in report:
            why = f"did not answer within {limit:.0f} s" if report is None else str(report["failed"])
            raise Resumable(f"cell {cell} can't start its engine again: {why}", "see its log; the same command resumes")
        return report
