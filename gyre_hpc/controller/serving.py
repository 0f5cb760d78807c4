"""The serving side of a cell's rank: the engines that it owns, if any, and the weights that they take.

Invariants: an engine that serves has the version that was announced, checked against that version's canary (keeper.py); without engines
everything here is nothing. Every wait has a name and a deadline.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells.waiting import wait
from gyre_hpc import canary
from gyre_hpc.config import Config
from gyre_hpc.controller.keeper import Keeper, Stopping
from gyre_hpc.controller.messages import Command, Update
from gyre_hpc.stopfile import StopFile

if TYPE_CHECKING:
    from gyre_hpc.engines.bank import EngineBank

logger = logging.getLogger(__name__)


class Serving:
    """Engines of one rank; `starting`: those under way, None for a rank without; `folder`: the attempt's own."""

    def __init__(self, config: Config, cell: int, starting: Future[EngineBank] | None, folder: Path) -> None:
        self.config, self._cell, self._starting = config, cell, starting
        self._base_canary = folder / canary.NAME
        """That of version 0: the base model's own folder is not ours."""
        self._stop = StopFile(folder)
        self._engines: Keeper | None = None

    def start(self, base_model: Path | None) -> dict[str, Any]:
        """They are up; with `base_model` they serve it as version 0 (a resumed core's weights are published first). What they say."""
        starting, deadline = self._starting, self.config.deadlines.start
        if starting is None:
            return {}
        wait(starting.done, "the cell's engines", deadline, logger.warning)
        bank, rollout = starting.result(), self.config.rollout
        tolerance = rollout.canary if rollout.canary is not None else canary.TOLERANCES[self.config.model.dtype]
        self._engines = Keeper(bank, self._cell, rollout.restarts, deadline, self._canary, tolerance, self._stop.soon)
        if base_model is not None:
            self._engines.verify(base_model, 0, deadline)
        return {"engines": bank.report(deadline)}

    def stop(self) -> None:
        """They end."""
        if self._engines is not None:
            self._engines.stop()
            self._engines = None

    def news(self) -> dict[int, int]:
        """Those that died since the last call; see Keeper."""
        return self._engines.news() if self._engines is not None else {}

    def addresses(self) -> dict[str, Any]:
        """For a report: where they are; {} without any."""
        return {"engines": self._engines.addresses()} if self._engines is not None else {}

    def rule(self, message: Command) -> None:
        """A part of a phase of this cell's transfer (controller/transfers.py). Raises DeadlineExceeded, Stopping."""
        engines = self._engines
        if engines is None:
            return
        match message.what:
            case "release":
                engines.release(message.seconds)
            case "load":
                engines.load(self._weights(message.weights), message.version, message.seconds)
            case "resume":
                engines.resume(self._weights(message.weights), message.version, message.seconds)
            case "pause":
                engines.pause(message.seconds)
            case "revive":
                engines.revive(self._weights(message.weights), message.version)
            case "where":
                pass
            case other:
                raise ValueError(f"unknown command {other!r}")

    def update(self, message: Update) -> dict[str, Any]:
        """A publication, where this cell takes part in it."""
        if self._engines is None or self._cell not in message.cells:
            return {}
        try:
            took = self._engines.load(self._weights(message.weights), message.version, self.config.deadlines.transfer, message.source)
        except Stopping as stopping:
            logger.warning("%s", stopping.line)
            took = {}
        return {"engines": self._engines.addresses(), **{name: value for name, value in took.items() if name != "load"}}

    def _canary(self, weights: Path, version: int) -> canary.Canary:
        """That of the version, as the core wrote it; what a person allows is all that it allows. Raises DeadlineExceeded, GyreError."""
        path = weights / canary.NAME if version else self._base_canary
        wait(path.is_file, f"the canary of version {version} to be seen on this node", self.config.deadlines.start, logger.warning)
        found = canary.read(path)
        return found if self.config.rollout.canary is None else replace(found, rounding=0.0)

    def _weights(self, directory: str) -> Path:
        """A published version; another node renamed it into place, and a network file system may show that late."""
        path = Path(directory)
        wait(path.is_dir, f"{path.name} to be seen on this node", self.config.deadlines.transfer, logger.warning)
        return path
