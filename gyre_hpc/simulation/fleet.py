"""The engines of all cells and of the standalone pool, and the executions on them; pure, time is handed in.

An engine with n of its s slots in use gives each execution the speed 1 / (1 + beta n / s). It keeps a virtual clock that runs at that
speed: an execution ends when the clock shows what it showed at the start plus the work, so a change of speed touches nobody.

Invariants: an execution is in one engine or in the queue; an engine never holds more than its room (its slots; or, where supervisors run
more executions at once than all engines hold, as many as they run); the queue is served in order of dispatch. Placement is the gateway's:
a new execution goes to the emptiest engine relative to its slots, one that was moved to the last open engine with room (the standalone pool
is the last of all).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence


class Execution:
    """One execution; `left` is its work while it waits, `ends` the engine's clock at its end while it runs."""

    __slots__ = ("began", "deadline", "ends", "engine", "group", "left", "number", "work")

    def __init__(self, number: int, group: int, work: float) -> None:
        self.number = number
        self.group = group
        self.work = self.left = work
        self.ends = 0.0
        self.engine = -1
        self.began = -1.0
        """When it started for the first time; negative before."""
        self.deadline = -1.0
        """Wall clock at which its budget is over; negative until it starts for the first time."""


class Engine:
    """One cell's engine, or the standalone pool's."""

    __slots__ = ("changes", "clock", "index", "open", "order", "room", "running", "share", "since", "slots", "speed", "whole")

    def __init__(self, index: int, slots: int, nodes: float, room: int) -> None:
        self.index = index
        self.slots = slots
        self.room = self.whole = room
        """What it may hold now, and what with nothing of it dead."""
        self.share = nodes / slots if slots else 0.0
        """Nodes of one slot."""
        self.open = slots > 0
        self.running: dict[int, Execution] = {}
        self.order: list[tuple[float, int]] = []
        """A heap of (clock at the end, number); those that left early stay until they come up."""
        self.clock = self.since = 0.0
        self.speed = 1.0
        self.changes = 0


class Fleet:
    """All engines. `dirty` are those whose next end may have changed; the caller asks `next_end` of them and clears it."""

    def __init__(
        self, slots: Sequence[int], beta: float, nodes: Sequence[float] = (), at_once: int | None = None, shared: bool = False
    ) -> None:
        """`at_once`: executions that supervisors run at all (Scenario.at_once); `shared`: an engine takes them beyond its slots."""
        self.beta = beta
        self.at_once = sum(slots) if at_once is None else at_once
        self.engines = [
            Engine(index, n, nodes[index] if nodes else 1.0, max(n, self.at_once) if shared and n else n) for index, n in enumerate(slots)
        ]
        self.queue: deque[Execution] = deque()
        self.dirty: set[int] = set()
        self.live = 0
        """Executions on engines."""
        self.busy = 0.0
        """Nodes whose slots are in use, by the share of them that is."""
        self._emptiest: list[tuple[float, int]] = []
        """A heap of (load, -index): an entry counts if it is still true."""
        self._roomy: list[int] = []
        """A heap of -index of engines that had room; checked when they come up."""
        self.moved = 0
        for engine in self.engines:
            self._offer(engine)

    # -- changes ------------------------------------------------------------------------------------------------------------------

    def add(self, execution: Execution, now: float) -> bool:
        """Start it, or queue it; whether it started."""
        engine = self._choose() if self.live < self.at_once else None
        if engine is None:
            self.queue.append(execution)
            return False
        self._start(engine, execution, now)
        return True

    def remove(self, execution: Execution, now: float) -> Execution | None:
        """It is over: out of its engine, or of the queue. Returns the execution from the queue that has its slot now."""
        if execution.engine < 0:
            self.queue.remove(execution)
            return None
        engine = self.engines[execution.engine]
        self._take_out(engine, execution, now)
        follower = None
        if self.queue and engine.open:
            follower = self.queue.popleft()
            self._start(engine, follower, now)
        else:
            self._offer(engine)
        return follower

    def close(self, index: int, now: float, cost: float) -> list[Execution]:
        """The engine admits nothing more; what it held goes on elsewhere, `cost` seconds of work more each. Returns what was moved.

        What finds no room (only after a restart) waits at the queue's front.
        """
        engine = self.engines[index]
        engine.open = False
        return self._move_away(engine, sorted(engine.running.values(), key=lambda e: e.number), now, cost)

    def hold(self, index: int, room: int, now: float, cost: float = 0.0) -> list[Execution]:
        """A part of the engine died, or is back: it may hold `room` executions. The youngest beyond that go on elsewhere, as with `close`.

        Returns what it took from the queue.
        """
        engine = self.engines[index]
        engine.room = room
        self._move_away(engine, sorted(engine.running.values(), key=lambda e: e.number)[room:], now, cost)
        return self.open(index, now) if engine.open else []

    def _move_away(self, engine: Engine, leaving: list[Execution], now: float, cost: float) -> list[Execution]:
        homeless = []
        for execution in leaving:
            self._take_out(engine, execution, now)
            execution.left += cost
            there = self._last_with_room()
            if there is None:
                homeless.append(execution)
            else:
                self._start(there, execution, now)
        self.queue.extendleft(reversed(homeless))
        self.moved += len(leaving)
        return leaving

    def open(self, index: int, now: float) -> list[Execution]:
        """The engine serves again; returns what it took from the queue."""
        engine = self.engines[index]
        engine.open = True
        started = []
        while self.queue and len(engine.running) < engine.room and self.live < self.at_once:
            execution = self.queue.popleft()
            self._start(engine, execution, now)
            started.append(execution)
        self._offer(engine)
        return started

    def begun(self) -> list[Execution]:
        """All that have begun and are not over, those whose slot died included."""
        on_engines = [execution for engine in self.engines for execution in engine.running.values()]
        return on_engines + [execution for execution in self.queue if execution.began >= 0]

    def next_end(self, index: int) -> tuple[float, Execution] | None:
        """(wall clock, execution) of the next end on an engine, if nothing changes."""
        engine = self.engines[index]
        while engine.order:
            ends, number = engine.order[0]
            execution = engine.running.get(number)
            if execution is not None and execution.ends == ends:
                return engine.since + max(0.0, ends - engine.clock) / engine.speed, execution
            heapq.heappop(engine.order)
        return None

    def pause(self, start: float, end: float) -> None:
        """No engine worked between `start` and `end` (now)."""
        for engine in self.engines:
            self._advance(engine, start)
            engine.since = end
            self.dirty.add(engine.index)

    def restart(self, now: float) -> None:
        """Every execution begins again, in order of dispatch, once an engine is opened; all of them are closed now."""
        everything = [execution for engine in self.engines for execution in engine.running.values()] + list(self.queue)
        for engine in self.engines:
            engine.open = False
            engine.running.clear()
            engine.order.clear()
            engine.since = now
            self._changed(engine)
        for execution in everything:
            execution.left, execution.engine = execution.work, -1
            execution.began = execution.deadline = -1.0
        self.queue = deque(sorted(everything, key=lambda e: e.number))
        self.live = 0
        self.busy = 0.0

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _advance(self, engine: Engine, now: float) -> None:
        if now > engine.since:
            engine.clock += (now - engine.since) * engine.speed
            engine.since = now

    def _changed(self, engine: Engine) -> None:
        engine.speed = 1.0 / (1.0 + self.beta * len(engine.running) / engine.slots) if engine.slots else 1.0
        engine.changes += 1
        self.dirty.add(engine.index)

    def _start(self, engine: Engine, execution: Execution, now: float) -> None:
        self._advance(engine, now)
        if execution.began < 0:
            execution.began = now
        execution.engine = engine.index
        execution.ends = engine.clock + execution.left
        engine.running[execution.number] = execution
        heapq.heappush(engine.order, (execution.ends, execution.number))
        self.live += 1
        if len(engine.running) <= engine.slots:
            self.busy += engine.share
        self._changed(engine)
        self._offer(engine)

    def _take_out(self, engine: Engine, execution: Execution, now: float) -> None:
        self._advance(engine, now)
        del engine.running[execution.number]
        execution.left = max(0.0, execution.ends - engine.clock)
        execution.engine = -1
        self.live -= 1
        if len(engine.running) < engine.slots:
            self.busy = max(0.0, self.busy - engine.share)
        self._changed(engine)

    def _offer(self, engine: Engine) -> None:
        """Remember that it has room."""
        if engine.open and len(engine.running) < engine.room:
            heapq.heappush(self._emptiest, (len(engine.running) / engine.slots, -engine.index))
            heapq.heappush(self._roomy, -engine.index)

    def _choose(self) -> Engine | None:
        while self._emptiest:
            load, index = self._emptiest[0]
            engine = self.engines[-index]
            if engine.open and len(engine.running) < engine.room and len(engine.running) / engine.slots == load:
                return engine
            heapq.heappop(self._emptiest)
        return None

    def _last_with_room(self) -> Engine | None:
        while self._roomy:
            engine = self.engines[-self._roomy[0]]
            if engine.open and len(engine.running) < engine.room:
                return engine
            heapq.heappop(self._roomy)
        return None
