"""The engines that one rank owns, as one: started, paused, updated, released and stopped together.

Invariants: every call goes to all engines at once and returns when the last has answered, so a cell never serves with two weight versions;
the first failure is raised after all have answered. Each engine keeps its number inside the cell, that of its route at the gateway.
Calls block with a deadline (seconds) and raise EngineFault, as those of a single `EngineServer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gyre_hpc.engines.factory import start_engine
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineServer, EngineSpec

T = TypeVar("T")
Starter = Callable[[EngineSpec, float], EngineServer]


class EngineBank:
    """Made by `start`; `specs` by engine number."""

    def __init__(self, specs: Mapping[int, EngineSpec], starter: Starter = start_engine) -> None:
        self.specs = dict(specs)
        self._starter = starter
        self._servers: dict[int, EngineServer] = {}
        self._pool = ThreadPoolExecutor(max(1, len(self.specs)), thread_name_prefix="engine")

    @staticmethod
    def start(specs: Mapping[int, EngineSpec], deadline: float, starter: Starter = start_engine) -> EngineBank:
        """Start all of them and wait until they serve. Raises what the first that fails raises; none is left then."""
        bank = EngineBank(specs, starter)
        futures = {number: bank._pool.submit(starter, spec, deadline) for number, spec in bank.specs.items()}
        failure: BaseException | None = None
        for number, future in futures.items():
            try:
                bank._servers[number] = future.result()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            bank.stop()
            raise failure
        return bank

    @property
    def addresses(self) -> dict[int, EngineAddress]:
        """Where each answers."""
        return {number: server.address for number, server in self._servers.items()}

    @property
    def pids(self) -> dict[int, int]:
        return {number: server.pid for number, server in self._servers.items()}

    def report(self, deadline: float) -> dict[str, dict[str, Any]]:
        """By number: the fields of its address, `pid`, and what it measured itself: `kv_tokens`, `holds` (executions of a full window)."""
        found = {}
        for number, server in self._servers.items():
            held = server.holding(deadline)
            found[str(number)] = {**asdict(server.address), "pid": server.pid, "kv_tokens": held.kv_tokens, "holds": held.executions}
        return found

    def dead(self) -> list[int]:
        """Numbers of those whose process has ended."""
        return [number for number, server in self._servers.items() if not server.alive()]

    def alive(self) -> bool:
        return not self.dead()

    def restart(self, numbers: Collection[int], model: Path, version: int, deadline: float) -> dict[int, EngineFault]:
        """New processes in place of dead ones, all at once, with these weights within `deadline` seconds; the faults of those that failed.

        The others serve when this returns, at other addresses. Whoever can't wait for it may stop the bank meanwhile, and end.
        """

        def one(number: int) -> None:
            end = time.monotonic() + deadline
            self._servers[number].stop()
            server = self._starter(self.specs[number], deadline)
            self._servers[number] = server
            server.update_weights(model, version, max(1.0, end - time.monotonic()))

        return _faults({number: _beside(partial(one, number)) for number in numbers})

    def pause(self, deadline: float) -> None:
        """Stop serving; calls in flight are refused with EngineFault at their client."""
        self._all(lambda server: server.pause(deadline))

    def resume(self, deadline: float) -> None:
        self._all(lambda server: server.resume(deadline))

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        """Every engine has `version`, checked by reading it back, and no KV of older ones, or this raises."""
        self._all(lambda server: server.update_weights(model, version, deadline))

    def release(self, deadline: float) -> None:
        """Free the memory that training needs; the processes stay."""
        self._all(lambda server: server.release(deadline))

    def restore(self, model: Path, version: int, deadline: float) -> None:
        """Undo `release` with these weights."""
        self._all(lambda server: server.restore(model, version, deadline))

    def each(self, action: Callable[[EngineServer], object], numbers: Collection[int] | None = None) -> dict[int, EngineFault]:
        """`action` on these engines (None: all) at once; the faults of those that failed. Raises what is no EngineFault."""
        chosen = self._servers if numbers is None else {number: self._servers[number] for number in numbers}
        futures = {number: self._pool.submit(action, server) for number, server in chosen.items()}
        return _faults(futures)

    def stop(self) -> None:
        """End every process."""
        self._all(lambda server: server.stop())
        self._pool.shutdown(wait=False)

    def _all(self, action: Callable[[EngineServer], T]) -> None:
        futures = [self._pool.submit(action, server) for server in self._servers.values()]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


def _beside(action: Callable[[], None]) -> Future[None]:
    """In a thread for which the process's end does not wait: an engine that starts takes minutes. Those of a pool are joined."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            action()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="start", daemon=True).start()
    return done


def _faults(futures: Mapping[int, Future[Any]]) -> dict[int, EngineFault]:
    """Wait for all; raises what is no EngineFault."""
    found = {number: future.exception() for number, future in futures.items()}
    for error in found.values():
        if error is not None and not isinstance(error, EngineFault):
            raise error
    return {number: error for number, error in found.items() if isinstance(error, EngineFault)}
