"""The engines that a rank owns, kept alive: one that dies, or fails in what it is told, is ended and started again with the wanted weights.

Invariants: an engine that failed is ended before anything else, for what it holds is not known (its memory is free then); a new one serves
only the version that was asked for, and has the same specification; all that are dead are started at once, within one start deadline. None
serves a version whose canary (gyre_hpc/canary.py) it does not repeat: it loads once more, then GyreError ends the attempt, because another
process would hardly do better.
Each engine is started again `restarts` times in an attempt; then Resumable ends the attempt, and the same command begins anew.
Once a stop is near none is started: the signal that asks for it may be what they died of, and whoever waits for them saves nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gyre_hpc.canary import Canary, short
from gyre_hpc.engines.bank import EngineBank
from gyre_hpc.engines.protocol import EngineFault, EngineServer, NotReceived
from gyre_hpc.errors import GyreError, Resumable

logger = logging.getLogger(__name__)
_LOOK = 0.2
"""Seconds between two looks, while engines start, whether the attempt is to stop."""


class Stopping(Resumable):
    """Engines that died are not started any more."""


class Keeper:
    """`start_deadline`: seconds for an engine to come up again; `canary` of (weights, version), to be repeated within `tolerance` nats, or
    what the canary allows; `stopping`: whether the attempt is to stop."""

    def __init__(
        self,
        bank: EngineBank,
        cell: int,
        restarts: int,
        start_deadline: float,
        canary: Callable[[Path, int], Canary],
        tolerance: float,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._bank, self._cell, self._restarts, self._start_deadline = bank, cell, restarts, start_deadline
        self._canary, self._tolerance, self._stopping = canary, tolerance, stopping
        self._released = False
        self._known: set[int] = set()
        """Pids whose end is known."""
        self._untold: dict[int, int] = {}
        """Engines that nobody was told of; the next may live already."""
        self._counts: Counter[int] = Counter()

    def addresses(self) -> dict[str, dict[str, Any]]:
        """By engine number: the fields of EngineAddress, and `pid`."""
        pids = self._bank.pids
        return {str(number): {**asdict(address), "pid": pids[number]} for number, address in self._bank.addresses.items()}

    def news(self) -> dict[int, int]:
        """Engines that have died since this was asked last, with the pids that they had; some may be replaced already."""
        self._note(self._bank.dead())
        dead, self._untold = self._untold, {}
        return dead

    def _note(self, dead: list[int]) -> None:
        for number in dead:
            pid = self._bank.pids[number]
            if pid not in self._known:
                self._known.add(pid)
                self._untold[number] = pid
                logger.warning("engine %d of cell %d (pid %d) died", number, self._cell, pid)

    def release(self, deadline: float) -> None:
        """Their memory is free; those that failed are dead."""

        end = time.monotonic() + deadline

        def both(server: EngineServer) -> None:
            server.pause(deadline)
            server.release(max(0.1, end - time.monotonic()))

        self._do(both)
        self._released = True

    def load(self, model: Path, version: int, deadline: float, source: str = "") -> dict[str, float]:
        """All have these weights; the dead ones are started again. A released one does not serve before `resume`.

        `source`: those that serve receive from there; who does not get everything in half of the deadline loads from files.
        They have `deadline` seconds for that, and at least a quarter of it to be verified.
        Seconds of `load`, and of `verify`: every engine is asked for its version and for the canary's log-probs. With a source, of
        `receive` too, how many engines `received` it whole, and how many loaded from files after all (`fell_back`).
        """
        began = time.monotonic()
        end = began + deadline
        action: Callable[[EngineServer], None]
        if self._released:

            def action(server: EngineServer) -> None:
                server.restore(model, version, deadline)

        else:

            def action(server: EngineServer) -> None:
                if source and self._receive(server, source, version, deadline, received):
                    return
                server.update_weights(model, version, max(1.0, end - time.monotonic()))

        received: list[float | None] = []
        self._do(action)
        loaded = time.monotonic()
        # a slow load leaves no time of its own deadline: an engine that has the weights is not ended for that
        self._verify(model, version, max(end, loaded + deadline / 4))
        verified = time.monotonic()
        self._released = False
        self.revive(model, version)
        took = {"load": loaded - began + time.monotonic() - verified, "verify": verified - loaded}
        if not received:
            return took
        whole = [seconds for seconds in received if seconds is not None]
        counts = {"received": float(len(whole)), "fell_back": float(len(received) - len(whole))}
        return {**took, "receive": max(whole, default=0.0), **counts}

    def _receive(self, server: EngineServer, source: str, version: int, deadline: float, received: list[float | None]) -> bool:
        """Whether it has the weights now; `received` gets the seconds, or None. Raises EngineFault where it is of no use any more."""
        began = time.monotonic()
        try:
            server.receive_weights(source, version, deadline)
        except NotReceived as why:
            logger.warning("%s; it loads version %d from files", why, version)
            received.append(None)
            return False
        received.append(time.monotonic() - began)
        return True

    def verify(self, model: Path, version: int, deadline: float) -> None:
        """All have these weights, as the trainer has them; those that do not are started again. Raises GyreError."""
        self._verify(model, version, time.monotonic() + deadline)
        self.revive(model, version)

    def resume(self, model: Path, version: int, deadline: float) -> None:
        """All serve these weights."""
        self._do(lambda server: server.resume(deadline))
        self.revive(model, version)

    def pause(self, deadline: float) -> None:
        self._do(lambda server: server.pause(deadline))

    def revive(self, model: Path, version: int) -> list[int]:
        """Start the dead ones with these weights, all at once; which they were. Raises Stopping, Resumable, GyreError."""
        started: set[int] = set()
        while dead := self._bank.dead():
            self._start(dead, model, version)
            started.update(dead)
            self._verify(model, version, time.monotonic() + self._start_deadline, dead)
        return sorted(started)

    def _start(self, dead: list[int], model: Path, version: int) -> None:
        self._note(dead)
        if self._stopping():
            raise self._no_more(dead)
        for number in dead:
            if self._counts[number] >= self._restarts:
                raise Resumable(
                    f"engine {number} of cell {self._cell} died, after {self._restarts} restarts (rollout.restarts)",
                    f"see {self._bank.specs[number].log}; the same command resumes",
                )
            self._counts[number] += 1
        began = time.monotonic()
        for number, fault in self._restart(dead, model, version).items():
            if self._stopping():
                raise self._no_more(dead)
            raise Resumable(f"engine {number} of cell {self._cell} did not start again: {fault}", "the same command resumes") from fault
        logger.warning("engines %s of cell %d started again in %.1f s", dead, self._cell, time.monotonic() - began)

    def _restart(self, dead: list[int], model: Path, version: int) -> dict[int, EngineFault]:
        """In a thread that is left behind where the attempt is to stop meanwhile."""
        done: Future[dict[int, EngineFault]] = Future()

        def start() -> None:
            try:
                done.set_result(self._bank.restart(dead, model, version, self._start_deadline))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=start, name="restart", daemon=True).start()
        while not wait([done], _LOOK).done:
            if self._stopping():
                raise self._no_more(dead)
        return done.result()

    def _no_more(self, dead: list[int]) -> Stopping:
        return Stopping(f"engines {dead} of cell {self._cell} are not started again: the attempt is to stop", "the same command resumes")

    def stop(self) -> None:
        self._bank.stop()

    def _verify(self, model: Path, version: int, end: float, chosen: Collection[int] | None = None) -> None:
        """Of the `chosen` (None: all) those that live; what has another version, or can't be asked, is ended. Raises GyreError."""
        canary = self._canary(model, version)
        numbers, allowed = {pid: number for number, pid in self._bank.pids.items()}, canary.allowed(self._tolerance)

        def action(server: EngineServer) -> None:
            for again in (False, True):
                difference, found = _compare(server, canary, end)
                if difference <= allowed:
                    told = numbers[server.pid], self._cell, version, difference, allowed
                    logger.info("engine %d of cell %d repeats version %d: %.1e nats of %.1e", *told)
                    return
                line = (
                    f"engine {numbers[server.pid]} of cell {self._cell} (pid {server.pid}) does not compute version {version} as the "
                    f"trainer: log-probs {short(found)}, expected {short(canary.logprobs)}; {difference:.3g} nats apart in the mean, "
                    f"{allowed:.3g} are allowed"
                )
                if again:
                    raise GyreError(
                        f"{line}, also after loading {model} again",
                        "see its log; rollout.canary = more nats only where it is meant to compute otherwise (quantised rollout.options)",
                    )
                logger.warning("%s; it loads them again", line)
                server.update_weights(model, version, max(1.0, end - time.monotonic()))

        self._do(action, chosen)

    def _do(self, action: Callable[[EngineServer], None], chosen: Collection[int] | None = None) -> None:
        """On all that live (of the `chosen`); those that fail are ended."""
        dead = set(self._bank.dead())
        among = self._bank.pids if chosen is None else chosen
        faults = self._bank.each(action, [number for number in among if number not in dead])
        for number, fault in faults.items():
            logger.warning("engine %d of cell %d is ended: %s", number, self._cell, fault)
        if faults:
            self._bank.each(lambda server: server.stop(), list(faults))


def _compare(server: EngineServer, canary: Canary, end: float) -> tuple[float, list[float]]:
    """(mean difference in nats, what the engine says) under the canary's version. Raises EngineFault where it has another one."""
    have = server.health(max(1.0, end - time.monotonic()))["version"]
    if have != canary.version:
        raise EngineFault(f"engine {server.pid} says version {have} after loading version {canary.version}")
    found = server.logprobs(canary.tokens, max(1.0, end - time.monotonic()))
    return canary.difference(found), found
