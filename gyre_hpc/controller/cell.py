"""A rank of a cell: follows the controller's announcements, trains (learner.py) and serves (serving.py), as its cell's role is.

Ordering key: announcements, in epoch order. Between two announcements a training rank claims micro-steps and works on them.
Invariants: the leader relays what it hears to its cell's other ranks and acknowledges when all have; a leader claims a micro-step, and its
rows are split over the cell's ranks by slot; while it computes a thread of it goes on hearing and passing on (cells/pump.py); one that
hears that the attempt stops gives its micro-step up, or the sums of a close, and takes no other. Some ranks own no engine of the cell
(gyre_hpc/layout.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells.claims import Claims
from cells.communicators import Communicators
from cells.epochs import Channel, DeadlineExceeded
from cells.lines import Lines
from cells.pump import Pump
from cells.waiting import wait
from cells.watchdog import Watch
from gyre_hpc import canary
from gyre_hpc.checkpoint import Checkpoint
from gyre_hpc.config import Config
from gyre_hpc.controller.hearing import Hearing
from gyre_hpc.controller.keeper import Stopping
from gyre_hpc.controller.learner import Learner
from gyre_hpc.controller.messages import (
    Close,
    Command,
    Export,
    Message,
    Prefix,
    Save,
    Share,
    Start,
    Stop,
    Update,
    Work,
    decode,
    encode,
)
from gyre_hpc.controller.place import Place
from gyre_hpc.controller.restoring import patience
from gyre_hpc.controller.serving import Serving
from gyre_hpc.controller.sums import GivenUp
from gyre_hpc.layout import training_cells
from gyre_hpc.paths import RunPaths
from gyre_hpc.training.settings import sharded

if TYPE_CHECKING:
    from gyre_hpc.engines.bank import EngineBank
    from gyre_hpc.training.interrupt import Interrupt

logger = logging.getLogger(__name__)
_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.02
_SLOWEST = frozenset({"verify", "receive"})
"""Seconds in reports of which a cell's is that of its slowest rank."""
_COUNTED = frozenset({"received", "fell_back"})
"""Engines in reports of which a cell has as many as its ranks together."""


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
        self.config, self.paths, self.base_model = config, paths, base_model
        self.place = Place(ranks.cell_index, ranks.slot, ranks.cell.Get_size(), ranks.cell_index < training_cells(config))
        self.checkpoint = checkpoint
        self._base_canary = folder / canary.NAME
        """That of version 0, in the attempt's own folder: the base model's is not ours."""
        self._claims = claims
        with watch("MPI to make the cell's channels", config.deadlines.start):
            self._inner = Channel(ranks.cell)
            self._upper = Channel(ranks.control) if ranks.control is not None else self._inner
            self._inner_lines = Lines(ranks.cell)
            self._lines = Lines(ranks.control) if ranks.control is not None else self._inner_lines
            """To the controller; of a cell's other ranks to their leader."""
        self._learner = Learner(config, paths, self.place, ranks, watch)
        self._hearing = Hearing(self._upper, self._is_settled)
        self._pump = Pump(self._turn)
        self._serving = Serving(config, self.place.cell, engines, folder)
        self._interrupt: Interrupt | None = None
        """Of the micro-step in hand, where one can be given up."""
        self._gave_up = False
        self._nap = _SHORTEST_NAP

    # -- the loop -----------------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Follow announcements until Stop."""
        while True:
            heard = self._hearing.take()
            if heard is not None:
                self._nap = _SHORTEST_NAP
                report = self._follow(heard.message, heard.raw)
                if heard.agree:
                    self._upper.acknowledge(heard.epoch, report)
                if isinstance(heard.message, Stop):
                    self._leave()
                    return heard.message.reason
                continue
            if self._answer_question():
                self._nap = _SHORTEST_NAP
                continue
            self._tell_news()
            if not self._work_once():
                self._learner.progress()
                time.sleep(self._nap)
                self._nap = min(self._nap * 1.5, _LONGEST_NAP)

    def _leave(self) -> None:
        """Nothing of ours may be under way in MPI when it is finalised."""
        if self._inner.is_root:
            self._inner.close()
        deadline = self.config.deadlines.step
        for channel, name in ((self._inner, "the cell's channel"), (self._upper, "the controller's channel")):
            wait(channel.drain, f"the end of {name}", deadline, logger.warning)
        for lines, name in ((self._inner_lines, "the cell's lines"), (self._lines, "the controller's lines")):
            wait(lines.drain, f"the end of {name}", deadline, logger.warning)
        wait(self._learner.progress, "weights on their way", deadline, logger.warning)

    def _turn(self) -> None:
        """What goes on while this rank computes: it hears, passes on what comes by it, and its weights move."""
        self._hearing.listen()
        self._inner.progress()
        self._learner.progress()
        if self._interrupt is not None and self._must_stop():
            self._interrupt.set()

    def _must_stop(self) -> bool:
        """Whether what comes next is the end: nobody asks for a save before it but to stop, or for more of the step that is open."""
        asked = self._lines.ahead() if self.place.is_leader else ()
        return self._hearing.ahead((Save, Stop)) or any(isinstance(decode(message), Save) for message in asked)

    def _is_settled(self, message: Message) -> bool:
        """Who else is in training is for the close to say."""
        return isinstance(message, Prefix) and self._learner.trains == self._in_prefix(message)

    def _in_prefix(self, message: Prefix) -> bool:
        return self.place.cell < message.cells

    def _answer_question(self) -> bool:
        """A question to this cell, if there is one; only leaders are asked."""
        question = self._lines.poll() if self.place.is_leader else None
        if question is None:
            return False
        self._lines.answer(question.number, self._follow(decode(question.message), question.message))
        return True

    def _tell_news(self) -> None:
        """The controller must know of engines that died: its routes lead there."""
        dead = self._serving.news()
        if dead:
            self._lines.tell({"died": dead})
        self._inner_lines.progress()
        while self.place.is_leader and (note := self._inner_lines.note()) is not None:
            self._lines.tell(note[1])

    def _tell_writing(self, seconds: float) -> None:
        """The controller must know how much longer the core may take: nobody else knows how many bytes its checkpoint has."""
        if self.place.is_leader:
            self._lines.tell({"writing": seconds})

    def _follow(self, message: Message, raw: dict[str, Any]) -> dict[str, Any]:
        """Do my part of one announcement; the leader's part includes having its cell's other ranks do theirs."""
        if isinstance(message, Close) and not self._finish_items(message):
            return {"given_up": True}
        relays = self.place.is_leader and self.place.ranks > 1
        epoch = self._inner.announce(raw, agree=True) if relays else -1
        try:
            report = self._handle(message)
        except GivenUp:
            self._gave_up = True
            logger.info("the attempt stops: the sums of step %d are given up", getattr(message, "step", -1))
            return {"given_up": True}
        if relays:
            name = f"the cell's ranks ({type(message).__name__})"
            others = wait(lambda: self._inner.reports(epoch), name, self._patience(message), logger.warning)
            for other in others or ():
                _put_together(report, other)
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
        learner = self._learner
        match message:
            case Start():
                return self._start(message)
            case Work():
                learner.take(message)
            case Share():
                self._do(message.item)
            case Prefix():
                learner.trains = self._in_prefix(message)
            case Command():
                return self._command(message)
            case Close():
                self._claims.next_step(message.items)
                return learner.close(message, self._tell_writing, self._look_for_stop)
            case Save():
                return learner.save(message.step, message.fields, message.state, message.seconds, self._tell_writing)
            case Export():
                return learner.export(message)
            case Update():
                return self._serving.update(message)
            case Stop():
                learner.stop()
                self._serving.stop()
        return {}

    def _start(self, message: Start) -> dict[str, Any]:
        """`message.step` is 0 for a new run; the weights of a resumed one are published before anybody serves them."""
        began, new = time.monotonic(), not message.step
        self._learner.start(self.base_model, self.checkpoint, self._base_canary if new else None)
        seconds = round(time.monotonic() - began, 2)
        return {"actor_seconds": seconds, **self._serving.start(self.base_model if new else None)}

    def _command(self, message: Command) -> dict[str, Any]:
        """A part of a phase of this cell's transfer (controller/transfers.py)."""
        try:
            match message.what:
                case "lend":
                    self._learner.lend(message.cell)
                case "withdraw":
                    return {"sent": self._learner.withdraw()}
                case "restore":
                    self._learner.restore(message.seconds)
                case "offload":
                    self._learner.offload()
                case _:
                    self._serving.rule(message)
        except (DeadlineExceeded, Stopping) as why:
            return {"failed": str(why)}
        return self._serving.addresses()

    def _work_once(self, upto: int | None = None) -> bool:
        """Leader: claim one micro-step, share it with the cell's other ranks and do my rows. False when none is left."""
        if not self._learner.trains or not self.place.is_leader or self._gave_up:
            return False
        item = self._claims.claim(self._learner.known if upto is None else upto)
        if item is None:
            return False
        self._nap = _SHORTEST_NAP
        if self.place.ranks > 1:
            self._inner.announce(encode(Share(item)), agree=False)
        self._do(item)
        return True

    def _do(self, item: int) -> None:
        """My rows of a micro-step."""
        with self._giving_up(), self._pump.working():
            self._learner.do(item)
        self._learner.progress()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """The body computes, for as long as nobody waits for this rank to stop. Ranks that share a model can't leave each other."""
        if sharded(self.config):
            yield
            return
        from gyre_hpc.training.interrupt import Interrupt, Interrupted

        began = time.monotonic()
        self._interrupt = Interrupt()
        try:
            with self._interrupt.armed(self._learner.actor.model):
                yield
        except Interrupted:
            self._gave_up = True
            logger.info("the attempt stops: a micro-step is given up after %.1f s", time.monotonic() - began)
        finally:
            self._interrupt = None

    def _finish_items(self, message: Close) -> bool:
        """Everything of the step that nobody has claimed yet, before the cell's other ranks hear of the close; False: it was given up."""
        while self._work_once(message.items):
            self._gave_up = self._gave_up or self._must_stop()
        return not self._gave_up

    def _look_for_stop(self) -> None:
        """Raises GivenUp once this rank is waited for."""
        self._hearing.listen()
        if self._must_stop():
            raise GivenUp


def _put_together(report: dict[str, Any], other: dict[str, Any]) -> None:
    """The leader's report with that of another rank of its cell: all engines and their counts, the slowest's seconds, the first failure."""
    report.setdefault("engines", {}).update(other.get("engines", {}))
    for name in _SLOWEST & set(other):
        report[name] = max(report.get(name, 0.0), other[name])
    for name in _COUNTED & set(other):
        report[name] = report.get(name, 0) + other[name]
    if "failed" in other:
        report.setdefault("failed", other["failed"])
