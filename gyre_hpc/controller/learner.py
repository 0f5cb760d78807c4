"""The training side of a cell's rank: a model of its own, the rows that it works on, and what it sums up, steps, saves and sends on.

Ordering key: micro-steps as their leader claims them; then the close of their step. Invariants: gradients leave a rank as one sum over the
prefix, slot by slot, and are added up inside the core cell; the core alone steps, saves and exports; it sends its weights to a satellite
that joins without stopping its own work; weights that are offered are withdrawn before a step changes them. A rank of a cell that never
trains has no model, and is asked for none of this.

Where the model is sharded (training/sharded.py) a rank's gradients and weights are those of its shard, and a cell's ranks compute each
micro-step together, also those without a row of it: what is collective in their own world is begun by an announcement, which all of them
hear in the same order, and is watched: a rank that does not come ends the attempt by the deadline of who waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cells.communicators import Communicators
from cells.reduce import start_broadcast
from cells.waiting import wait
from cells.watchdog import Watch
from gyre_hpc.checkpoint import Checkpoint, RunState, read_core
from gyre_hpc.config import Config
from gyre_hpc.controller.cellworld import CellWorld
from gyre_hpc.controller.messages import Close, Export, RowRef, Work
from gyre_hpc.controller.offer import Offer
from gyre_hpc.controller.place import Place, own_host
from gyre_hpc.controller.restoring import patience
from gyre_hpc.controller.rows import Rows
from gyre_hpc.controller.saving import Limits, save
from gyre_hpc.controller.snapshots import Snapshots
from gyre_hpc.controller.sums import into_core
from gyre_hpc.importing import uncollected
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.loss import Sums
from gyre_hpc.training.settings import sharded
from gyre_hpc.training.world import Seat
from trees.store import StoreReader

if TYPE_CHECKING:
    from mpi4py import MPI

    from gyre_hpc.training.actor import Core, Satellite

logger = logging.getLogger(__name__)


class Learner:
    """One rank's. `watch` guards what blocks without a deadline of its own."""

    def __init__(self, config: Config, paths: RunPaths, place: Place, ranks: Communicators, watch: Watch) -> None:
        self.config, self.paths, self.place = config, paths, place
        self.trains = False
        """Whether this cell is in training now."""
        self._ranks, self._watch = ranks, watch
        self._rows = Rows(
            StoreReader(paths.trees),
            config.training.jmax,
            config.run.seed,
            lambda test, name: wait(test, name, config.deadlines.step, logger.warning),
        )
        self._actor: Core | Satellite | None = None
        self._items: list[tuple[RowRef, ...]] = []
        self._sums: Sums | None = None
        self._lent: Snapshots | None = None
        self._offer = Offer()

    @property
    def actor(self) -> Core | Satellite:
        """Its model. Only cells that train are asked."""
        if self._actor is None:
            raise RuntimeError(f"cell {self.place.cell} has no model of its own")
        return self._actor

    @property
    def core(self) -> Core:
        """The same, of a rank of the core cell."""
        from gyre_hpc.training.actor import Core

        core = self.actor
        assert isinstance(core, Core)
        return core

    @property
    def _cell(self) -> MPI.Intracomm:
        assert self._ranks.cell is not None
        return self._ranks.cell

    @property
    def _world(self) -> CellWorld:
        return CellWorld(self._cell, self.place, self.config.deadlines, self._watch, sharded(self.config))

    # -- start and stop -----------------------------------------------------------------------------------------------------------

    def start(self, base_model: Path, checkpoint: Checkpoint | None, base_canary: Path | None) -> None:
        """The model is there, its checkpoint restored, and the device the engines': every cell begins in rollout.

        `base_canary`: where the core's leader writes the canary of version 0, None after a resume.
        """
        with uncollected():
            from gyre_hpc.training.actor import Satellite

        if not self.place.trains:
            logger.info("cell %d only serves: it holds no model of its own", self.place.cell)
            return
        local = self.place.slot % self.config.cells.ranks_per_node
        if not self.place.is_core and not sharded(self.config):
            self._actor = Satellite(base_model, self.config, local)
        else:
            with self._world.entering() as seat:
                self._actor = self._seated(base_model, seat, local)
        if self.place.is_core:
            self._restored(self.core, checkpoint, base_canary)
        self._actor.offload()

    def _seated(self, base_model: Path, seat: Seat, local: int) -> Core | Satellite:
        from gyre_hpc.training.actor import Core, Satellite

        if self.place.is_core:
            return Core(base_model, self.config, seat.rank, seat.ranks, seat.master, local)
        return Satellite(base_model, self.config, local, seat)

    def _restored(self, core: Core, checkpoint: Checkpoint | None, base_canary: Path | None) -> None:
        """From its checkpoint, or the canary of the base model is written."""
        if checkpoint is not None:
            state = read_core(checkpoint, self.place.slot)
            # what follows is collective, on a world whose own deadline is that of a start
            limit = patience(self.config, checkpoint)
            wait(self._cell.Ibarrier().Test, "the core's ranks to load their shards", limit, logger.warning)
            core.load_state(state)
        if base_canary is not None and (self.place.is_leader or core.sharded):
            with self._world.together("the core's ranks to compute the base model's canary", self.config.deadlines.start):
                told = core.canary(0)
            if self.place.is_leader:
                told.write(base_canary)

    def stop(self) -> None:
        """Nothing is offered any more, and the cell's own world is over."""
        self._offer.end()
        if self._actor is not None and (self.place.is_core or self._actor.sharded):
            self._world.leave(self._actor.close)

    # -- roles --------------------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """The device is the engines'."""
        self.actor.offload()

    def restore(self, deadline: float) -> None:
        """The training state is on the device, a satellite's weights are the core's. Raises DeadlineExceeded."""
        self.actor.onload()
        if not self.place.is_core:
            self.actor.pull(self._snapshots().pull(self.actor.size, deadline))
        self.actor.zero()
        self._sums = None

    def lend(self, cell: int) -> None:
        """The core's weights go to a satellite that joins; does not wait."""
        self._snapshots().lend(self.actor.snapshot(), cell)

    def progress(self) -> bool:
        """Let MPI work; whether no weights are on their way to or from other cells."""
        return self._lent is None or self._lent.progress()

    def _snapshots(self) -> Snapshots:
        if self._lent is None:
            self._lent = Snapshots(self._ranks.prefix(self._ranks.layout.cells))
        return self._lent

    # -- training -----------------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Micro-steps of the open step that were announced."""
        return len(self._items)

    def take(self, message: Work) -> None:
        """More micro-steps of the open step."""
        if message.first != self.known:
            raise RuntimeError(f"micro-steps from {message.first} announced, but {self.known} are known")
        self._items.extend(message.items)

    def do(self, item: int) -> None:
        """My rows of one micro-step; calls nothing of MPI."""
        began = time.monotonic()
        rows = [self._rows.of(ref) for ref in self._items[item][self.place.slot :: self.place.ranks]]
        if rows or self.actor.sharded:
            with self._world.computing(f"the cell's ranks in micro-step {item}", self.config.deadlines.step):
                sums = replace(self.actor.accumulate(rows), seconds=time.monotonic() - began)
            self._sums = sums if self._sums is None else self._sums + sums

    def close(
        self, message: Close, tell: Callable[[float], None] = lambda seconds: None, look: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The step is over: sums over the prefix, the core's optimizer step, new weights for satellites that stay, the checkpoint.

        `tell`, see `save`; `look` may raise GivenUp while it waits for others' sums, see `into_core`.
        """
        self._items = []
        self._rows.forget()
        if self.place.cell >= message.prefix:
            return {}
        began = time.monotonic()
        gradient = self.actor.gradient()
        sums = self._sums.array() if self._sums is not None else np.zeros(Sums.size(), np.float64)
        into_core(self._ranks, gradient, sums, message.prefix, self.config.deadlines.step, self.actor.sharded, look)
        reduced = time.monotonic()
        self._offer.close()
        report = self._step(message, gradient, Sums.of(sums)) if self.place.is_core else {}
        if message.refresh and message.prefix > 1:
            self._refresh(message.prefix)
        if message.checkpoint and self.place.is_core:  # behind what others wait for
            report.update(self.save(message.step, report["fields"], message.state, self.config.deadlines.step, tell))
        self.actor.zero()
        self._sums = None
        report["reduce_seconds"] = round(reduced - began, 4)
        report["close_seconds"] = round(time.monotonic() - began, 4)
        return report

    def _step(self, message: Close, gradient: NDArray[np.float32], sums: Sums) -> dict[str, Any]:
        core = self.core
        if core.version != message.step - 1:
            raise RuntimeError(f"step {message.step} is asked of weights of version {core.version}")
        began = time.monotonic()
        with self._world.together(f"the core's ranks in step {message.step}", self.config.deadlines.step):
            metrics = core.step(gradient, message.executions)
        means = sums.means(message.executions, message.step - 1)
        means["token_staleness"] = means.pop("staleness_mean")
        means["trained_targets"] = means.pop("target_tokens")
        fields = {
            **means,
            **message.fields,
            "grad_norm": metrics.grad_norm,
            "lr": metrics.lr,
            "step_seconds": round(time.monotonic() - began, 4),
        }
        return {"fields": fields}

    def save(
        self,
        step: int,
        fields: dict[str, Any],
        state: dict[str, Any],
        deadline: float,
        tell: Callable[[float], None] = lambda seconds: None,
    ) -> dict[str, Any]:
        """The checkpoint of a step that is over: all ranks of the core. `tell` hears how many seconds it may take on top of `deadline`.

        {failed: why} where the weights are of another step.
        """
        if not self.place.is_core:
            return {}
        if self.core.version != step:
            return {"failed": f"the core's weights are of step {self.core.version} by now"}
        run = RunState(step, step, policy={**state, "fields": fields})
        limits = Limits(deadline, self.config.checkpoint.slowest_write, tell)
        return {"checkpoint": save(self._cell, self.paths, self.config.checkpoint.keep, self.core, run, limits)}

    def _refresh(self, prefix: int) -> None:
        """The burst goes on: the satellites in training take the stepped weights."""
        flat = self.actor.snapshot()
        # a satellite may be here while the core still computes its last micro-step: what it waits for is the end of the step
        start_broadcast(self._ranks.prefix(prefix), flat).wait("the stepped weights", self.config.deadlines.step, logger.warning)
        if not self.place.is_core:
            self.actor.pull(flat)

    # -- publication --------------------------------------------------------------------------------------------------------------

    def export(self, message: Export) -> dict[str, Any]:
        """The core's weights as files, and offered from memory where that is asked for."""
        if not self.place.is_core:
            return {}
        core = self.core
        if not self.trains:
            core.onload()
        with self._world.together(f"the core's ranks to write version {message.version}", self.config.deadlines.transfer):
            core.export(Path(message.weights))
        source = ""
        if message.offer:
            source = self._gathered(core, message) if core.sharded else self._offered(core, message) if self.place.is_leader else ""
        if not self.trains:
            core.offload()
        return {"source": source} if source else {}

    def _offered(self, core: Core, message: Export) -> str:
        """The source, "" where it can't be done. Weights that leave the device after this are copied to the host first."""
        if message.offer == "direct":
            return self._offer.open(own_host(), message.version, core.weights, core.copied)
        weights, copied = partial(core.weights, on_device=self.trains), 0 if self.trains else core.copied
        soon = self.config.deadlines.transfer / 8
        return self._offer.broadcast(own_host(), message.version, weights, copied, core.device, message.engines, soon)

    def _gathered(self, core: Core, message: Export) -> str:
        """The same of a sharded model: the leader gets all of it first, if it has room; all ranks of the core take part."""
        with self._world.together(f"the core's ranks to gather version {message.version}", self.config.deadlines.transfer):
            if not core.agreed(not self.place.is_leader or self._offer.has_room(message.version, core.copied)):
                return ""
            weights = core.weights()
        if not self.place.is_leader:
            return ""
        if message.offer == "direct":
            return self._offer.open(own_host(), message.version, lambda: weights)
        soon = self.config.deadlines.transfer / 8
        return self._offer.broadcast(own_host(), message.version, lambda: weights, 0, core.device, message.engines, soon)

    def withdraw(self) -> dict[str, Any]:
        """Nothing is offered any more; what was sent."""
        return self._offer.close()
