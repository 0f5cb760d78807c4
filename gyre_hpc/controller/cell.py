"""A rank of a cell: follows the controller's announcements, serves or trains. Some also own engines of the cell (gyre_hpc/layout.py).

Ordering key: announcements, in epoch order. Between two announcements a training rank claims micro-steps and works on them.
Invariants: the leader relays what it hears to its cell's other ranks and acknowledges when all have; a micro-step is claimed by a
leader and its rows are split over the cell's ranks by slot; gradients leave a rank as one sum over the prefix, slot by slot, and are
added up inside the core cell; the core sends its weights to a satellite that joins without stopping its own work.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cells.claims import Claims
from cells.communicators import Communicators
from cells.epochs import Channel, DeadlineExceeded
from cells.lines import Lines
from cells.reduce import start_broadcast
from cells.waiting import wait
from cells.watchdog import Watch
from gyre_hpc import canary
from gyre_hpc.checkpoint import Checkpoint, RunState, read_core
from gyre_hpc.config import Config
from gyre_hpc.controller.keeper import Keeper
from gyre_hpc.controller.messages import (
    Close,
    Command,
    Export,
    Message,
    Prefix,
    RowRef,
    Save,
    Share,
    Start,
    Stop,
    Update,
    Work,
    decode,
    encode,
)
from gyre_hpc.controller.offer import Offer
from gyre_hpc.controller.restoring import patience
from gyre_hpc.controller.rows import Rows
from gyre_hpc.controller.saving import save
from gyre_hpc.controller.snapshots import Snapshots
from gyre_hpc.controller.sums import into_core
from gyre_hpc.importing import uncollected
from gyre_hpc.layout import training_cells
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.loss import Sums
from trees.store import StoreReader

if TYPE_CHECKING:
    from gyre_hpc.engines.bank import EngineBank
    from gyre_hpc.training.actor import Core, Satellite

logger = logging.getLogger(__name__)
_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.02
_SLOWEST = frozenset({"verify", "receive"})
"""Seconds in reports of which a cell's is that of its slowest rank."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands."""

    cell: int
    slot: int
    ranks: int
    trains: bool = True
    """Whether this cell ever does: others hold no model of their own."""

    @property
    def is_leader(self) -> bool:
        return self.slot == 0

    @property
    def is_core(self) -> bool:
        return self.cell == 0


class CellRank:
    """One rank's life between MPI_Init and MPI_Finalize. `run` returns the reason of the Stop message."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        base_model: Path,
        ranks: Communicators,
        claims: Claims,
        engines: Future[EngineBank] | None,
        checkpoint: Checkpoint | None,
        folder: Path,
        watch: Watch,
    ) -> None:
        assert ranks.cell is not None
        assert ranks.cell_index is not None
        assert ranks.slot is not None
        self.config, self.paths, self.base_model, self.ranks = config, paths, base_model, ranks
        self.place = Place(ranks.cell_index, ranks.slot, ranks.cell.Get_size(), ranks.cell_index < training_cells(config))
        self.checkpoint = checkpoint
        self._base_canary = folder / canary.NAME
        """That of version 0, in the attempt's own folder: the base model's is not ours."""
        self._claims = claims
        self._watch = watch
        self._inner = Channel(ranks.cell)
        self._upper = Channel(ranks.control) if ranks.control is not None else self._inner
        self._inner_lines = Lines(ranks.cell)
        self._lines = Lines(ranks.control) if ranks.control is not None else self._inner_lines
        """To the controller; of a cell's other ranks to their leader."""
        self._starting = engines
        self._engines: Keeper | None = None
        self._rows = Rows(StoreReader(paths.trees), config.training.jmax, config.run.seed, self._wait)
        self._actor: Core | Satellite | None = None
        self._training = False
        self._items: list[tuple[RowRef, ...]] = []
        self._sums: Sums | None = None
        self._lent: Snapshots | None = None
        self._offer = Offer()
        self._nap = _SHORTEST_NAP

    # -- the loop -----------------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Follow announcements until Stop."""
        while True:
            announcement = self._upper.poll()
            if announcement is not None:
                self._nap = _SHORTEST_NAP
                message = decode(announcement.message)
                report = self._follow(message, announcement.message)
                if announcement.agree:
                    self._upper.acknowledge(announcement.epoch, report)
                if isinstance(message, Stop):
                    self._leave()
                    return message.reason
                continue
            if self._answer_question():
                self._nap = _SHORTEST_NAP
                continue
            self._tell_news()
            if not self._work_once():
                self._poll_sends()
                time.sleep(self._nap)
                self._nap = min(self._nap * 1.5, _LONGEST_NAP)

    def _leave(self) -> None:
        """Nothing of ours may be under way in MPI when it is finalised."""
        if self._inner.is_root:
            self._inner.close()
        for channel, name in ((self._inner, "the cell's channel"), (self._upper, "the controller's channel")):
            self._wait(channel.drain, f"the end of {name}")
        for lines, name in ((self._inner_lines, "the cell's lines"), (self._lines, "the controller's lines")):
            self._wait(lines.drain, f"the end of {name}")
        self._wait(self._poll_sends, "weights on their way")

    def _answer_question(self) -> bool:
        """A question to this cell, if there is one; only leaders are asked."""
        question = self._lines.poll() if self.place.is_leader else None
        if question is None:
            return False
        self._lines.answer(question.number, self._follow(decode(question.message), question.message))
        return True

    def _tell_news(self) -> None:
        """The controller must know of engines that died: its routes lead there."""
        dead = self._engines.news() if self._engines is not None else {}
        if dead:
            self._lines.tell({"died": dead})
        self._inner_lines.progress()
        while self.place.is_leader and (note := self._inner_lines.note()) is not None:
            self._lines.tell(note[1])

    def _follow(self, message: Message, raw: dict[str, Any]) -> dict[str, Any]:
        """Do my part of one announcement; the leader's part includes having its cell's other ranks do theirs."""
        if isinstance(message, Close):
            self._finish_items(message)
        relays = self.place.is_leader and self.place.ranks > 1
        epoch = self._inner.announce(raw, agree=True) if relays else -1
        report = self._handle(message)
        if relays:
            others = self._wait(lambda: self._inner.reports(epoch), f"the cell's ranks ({type(message).__name__})", self._patience(message))
            for other in others:
                report.setdefault("engines", {}).update(other.get("engines", {}))
                for name in _SLOWEST & set(other):
                    report[name] = max(report.get(name, 0.0), other[name])
                if "fell_back" in other:
                    report["fell_back"] = report.get("fell_back", 0) + other["fell_back"]
                if "failed" in other:
                    report.setdefault("failed", other["failed"])
        return report

    def _patience(self, message: Message) -> float:
        """Seconds for the cell's other ranks: never less than what they may take by their own deadlines (an engine may have to start)."""
        deadlines = self.config.deadlines
        match message:
            case Start():
                own = patience(self.config, self.checkpoint)
            case Update():
                own = 1.5 * deadlines.transfer + deadlines.start
            case Command():
                own = 1.5 * message.seconds + deadlines.start
            case _:
                own = 0.0
        return max(deadlines.step, own)

    def _handle(self, message: Message) -> dict[str, Any]:
        match message:
            case Start():
                return self._start(message)
            case Work():
                if message.first != len(self._items):
                    raise RuntimeError(f"micro-steps from {message.first} announced, but {len(self._items)} are known")
                self._items.extend(message.items)
                return {}
            case Share():
                self._do(message.item)
                return {}
            case Prefix():
                self._training = self.place.cell < message.cells
                return {}
            case Command():
                return self._command(message)
            case Close():
                return self._close(message)
            case Save():
                return self._save(message.step, message.fields, message.state, message.seconds)
            case Export():
                return self._export(message)
            case Update():
                return self._update(message)
            case Stop():
                return self._stop()

    def _wait(self, test: Callable[[], Any], name: str, deadline: float | None = None) -> Any:
        return wait(test, name, self.config.deadlines.step if deadline is None else deadline, logger.warning)

    # -- start and stop -----------------------------------------------------------------------------------------------------------

    def _start(self, message: Start) -> dict[str, Any]:
        with uncollected():
            from gyre_hpc.training.actor import Core, Satellite

        assert self.ranks.cell is not None
        began = time.monotonic()
        local = self.place.slot % self.config.cells.ranks_per_node
        if not self.place.trains:
            logger.info("cell %d only serves: it holds no model of its own", self.place.cell)
        elif self.place.is_core:
            with socket.socket() as held:
                self._wait(self.ranks.cell.Ibarrier().Test, "the core's ranks to start", self.config.deadlines.start)
                master = self._address(_hold_address(held) if self.place.is_leader else "")
                core = Core(self.base_model, self.config, self.place.slot, self.place.ranks, master, local)
            if self.checkpoint is not None:
                state = read_core(self.checkpoint, self.place.slot)
                # what follows is collective, on a world whose own deadline is that of a start
                limit = patience(self.config, self.checkpoint)
                self._wait(self.ranks.cell.Ibarrier().Test, "the core's ranks to load their shards", limit)
                core.load_state(state)
            self._actor = core
        else:
            self._actor = Satellite(self.base_model, self.config, local)
        if self._actor is not None:
            if self.place.is_core and self.place.is_leader and not message.step:
                self._actor.canary(0).write(self._base_canary)
            self._actor.offload()  # every cell begins in rollout: the device is the engines'
        report: dict[str, Any] = {"actor_seconds": round(time.monotonic() - began, 2)}
        if self._starting is not None:
            bank: EngineBank = self._wait(self._started, "the cell's engines", self.config.deadlines.start)
            self._engines = self._keeper(bank)
            if not message.step:  # a resumed core's weights are published first
                self._engines.verify(self.base_model, 0, self.config.deadlines.start)
            report["engines"] = bank.report(self.config.deadlines.start)
        return report

    def _address(self, mine: str) -> str:
        """The leader's address, to all ranks of the core. Nobody leaves before all have it: torch's rendezvous, where the leader goes next,
        gives MPI no progress, and a message that still waits for its connection would wait for ever."""
        assert self.ranks.cell is not None
        held = bytearray(mine.encode().ljust(_ADDRESS, b"\0"))
        self._wait(self.ranks.cell.Ibcast(held, 0).Test, "the address of the core's own world", self.config.deadlines.start)
        self._wait(self.ranks.cell.Ibarrier().Test, "the core's ranks to have its world's address", self.config.deadlines.start)
        return held.rstrip(b"\0").decode()

    def _keeper(self, bank: EngineBank) -> Keeper:
        rollout, deadline = self.config.rollout, self.config.deadlines.start
        tolerance = rollout.canary if rollout.canary is not None else canary.TOLERANCES[self.config.model.dtype]
        return Keeper(bank, self.place.cell, rollout.restarts, deadline, self._canary, tolerance)

    def _started(self) -> EngineBank | None:
        assert self._starting is not None
        return self._starting.result() if self._starting.done() else None

    def _stop(self) -> dict[str, Any]:
        from gyre_hpc.training.actor import Core

        self._offer.close()
        if isinstance(self._actor, Core):
            assert self.ranks.cell is not None
            # on NCCL the end is collective: it can't be taken back, and only waited for inside
            self._wait(self.ranks.cell.Ibarrier().Test, "the core's ranks to leave their world")
            with self._watch("the core's own world to end", self.config.deadlines.step):
                self._actor.close()
        if self._engines is not None:
            self._engines.stop()
            self._engines = None
        return {}

    # -- roles --------------------------------------------------------------------------------------------------------------------

    def _command(self, message: Command) -> dict[str, Any]:
        """A part of a phase of this cell's transfer (controller/transfers.py)."""
        try:
            if message.what == "lend":
                assert self._actor is not None
                self._snapshots().lend(self._actor.snapshot(), message.cell)
            elif message.what == "withdraw":
                return {"sent": self._offer.close()}
            elif message.what == "restore":
                self._train(message.seconds)
            elif message.what == "offload":
                assert self._actor is not None
                self._actor.offload()
            elif self._engines is not None:
                self._rule_engines(self._engines, message)
        except DeadlineExceeded as late:
            return {"failed": str(late)}
        return {"engines": self._engines.addresses()} if self._engines is not None else {}

    def _rule_engines(self, engines: Keeper, message: Command) -> None:
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

    def _train(self, deadline: float) -> None:
        """The training state is on the device, a satellite's weights are the core's. Raises DeadlineExceeded."""
        assert self._actor is not None
        self._actor.onload()
        if not self.place.is_core:
            self._actor.pull(self._snapshots().pull(self._actor.size, deadline))
        self._actor.zero()
        self._sums = None

    def _snapshots(self) -> Snapshots:
        if self._lent is None:
            self._lent = Snapshots(self.ranks.prefix(self.ranks.layout.cells))
        return self._lent

    # -- training -----------------------------------------------------------------------------------------------------------------

    def _work_once(self, upto: int | None = None) -> bool:
        """Leader: claim one micro-step, share it with the cell's other ranks and do my rows. False when none is left."""
        if not self._training or not self.place.is_leader:
            return False
        item = self._claims.claim(len(self._items) if upto is None else upto)
        if item is None:
            return False
        self._nap = _SHORTEST_NAP
        if self.place.ranks > 1:
            self._inner.announce(encode(Share(item)), agree=False)
        self._do(item)
        return True

    def _do(self, item: int) -> None:
        assert self._actor is not None
        began = time.monotonic()
        rows = [self._rows.of(ref) for ref in self._items[item][self.place.slot :: self.place.ranks]]
        if rows:
            sums = replace(self._actor.accumulate(rows), seconds=time.monotonic() - began)
            self._sums = sums if self._sums is None else self._sums + sums
        self._poll_sends()

    def _poll_sends(self) -> bool:
        """Whether no weights are on their way to or from other cells."""
        return self._lent is None or self._lent.progress()

    def _finish_items(self, message: Close) -> None:
        """Everything of the step that nobody has claimed yet. Before the cell's other ranks hear of the close."""
        while self._work_once(message.items):
            pass

    def _close(self, message: Close) -> dict[str, Any]:
        self._claims.next_step(message.items)
        self._items = []
        self._rows.forget()
        if self.place.cell >= message.prefix:
            return {}
        assert self._actor is not None
        began = time.monotonic()
        gradient = self._actor.gradient()
        sums = self._sums.array() if self._sums is not None else np.zeros(Sums.size(), np.float64)
        into_core(self.ranks, gradient, sums, message.prefix, self.config.deadlines.step)
        reduced = time.monotonic()
        self._offer.close()  # nobody reads weights that the step changes
        report = self._step(message, gradient, Sums.of(sums)) if self.place.is_core else {}
        if message.refresh and message.prefix > 1:
            self._refresh(message.prefix)
        self._actor.zero()
        self._sums = None
        report["reduce_seconds"] = round(reduced - began, 4)
        report["close_seconds"] = round(time.monotonic() - began, 4)
        return report

    def _step(self, message: Close, gradient: NDArray[np.float32], sums: Sums) -> dict[str, Any]:
        from gyre_hpc.training.actor import Core

        core = self._actor
        assert isinstance(core, Core)
        if core.version != message.step - 1:
            raise RuntimeError(f"step {message.step} is asked of weights of version {core.version}")
        began = time.monotonic()
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
        report: dict[str, Any] = {"fields": fields}
        if message.checkpoint:
            report.update(self._save(message.step, fields, message.state, self.config.deadlines.step))
        return report

    def _save(self, step: int, fields: dict[str, Any], state: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The checkpoint of a step that is over: all ranks of the core."""
        from gyre_hpc.training.actor import Core

        core = self._actor
        if not self.place.is_core:
            return {}
        assert isinstance(core, Core)
        assert self.ranks.cell is not None
        if core.version != step:
            raise RuntimeError(f"a checkpoint of step {step} is asked of weights of version {core.version}")
        run = RunState(step, step, policy={**state, "fields": fields})
        return {"checkpoint": save(self.ranks.cell, self.paths, self.config.checkpoint.keep, core, run, deadline)}

    def _refresh(self, prefix: int) -> None:
        """The burst goes on: the satellites in training take the stepped weights."""
        assert self._actor is not None
        flat = self._actor.snapshot()
        start_broadcast(self.ranks.prefix(prefix), flat).wait("the stepped weights", self.config.deadlines.transfer, logger.warning)
        if not self.place.is_core:
            self._actor.pull(flat)

    # -- weights ------------------------------------------------------------------------------------------------------------------

    def _export(self, message: Export) -> dict[str, Any]:
        from gyre_hpc.training.actor import Core

        if self.place.is_core:
            assert isinstance(self._actor, Core)
            if not self._training:
                self._actor.onload()
            self._actor.export(Path(message.weights))
            source = ""
            if message.offer and self.place.is_leader:
                source = self._offer.open(_own_host(), message.version, self._actor.weights, self._actor.copied)
            if not self._training:
                self._actor.offload()
            if source:
                return {"source": source}
        return {}

    def _update(self, message: Update) -> dict[str, Any]:
        if self._engines is None or self.place.cell not in message.cells:
            return {}
        took = self._engines.load(self._weights(message.weights), message.version, self.config.deadlines.transfer, message.source)
        return {"engines": self._engines.addresses(), **{name: value for name, value in took.items() if name != "load"}}

    def _canary(self, weights: Path, version: int) -> canary.Canary:
        """That of the version, as the core wrote it; what a person allows is all that it allows. Raises DeadlineExceeded, GyreError."""
        path = weights / canary.NAME if version else self._base_canary
        self._wait(path.is_file, f"the canary of version {version} to be seen on this node", self.config.deadlines.start)
        found = canary.read(path)
        return found if self.config.rollout.canary is None else replace(found, rounding=0.0)

    def _weights(self, directory: str) -> Path:
        """A published version; another node renamed it into place, and a network file system may show that late."""
        path = Path(directory)
        self._wait(path.is_dir, f"{path.name} to be seen on this node", self.config.deadlines.transfer)
        return path


_ADDRESS = 320
"""Bytes for host:port; a host's name has 253 at most."""


def _hold_address(held: socket.socket) -> str:
    """host:port for the core cell's own torch.distributed world. `held` keeps the port from other processes (it does not listen, so that
    the world's own socket may be bound to it as well) until the world is there."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return f"{_own_host()}:{held.getsockname()[1]}"


def _own_host() -> str:
    """The name under which other nodes of the job reach this one."""
    return (os.environ.get("SLURMD_NODENAME") and socket.gethostname()) or "127.0.0.1"
