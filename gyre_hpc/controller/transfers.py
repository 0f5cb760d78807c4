"""Changes of roles as they really happen: cells/transfer.py says what is next, this has the gateway, the cell and the core do it.

Ordering key: the machine's actions; `transfer.phase` in events.jsonl tells of each, done or undone, in that order. Invariants: a phase's
deadline is kept where it is carried out (the gateway answers 409, the cell's leader `failed`), and what has answered has nothing of it
under way any more; an answer that does not come in half as long again, and some seconds, means that the cell is lost. The prefix changes by
an epoch that all leaders acknowledge: they agree on who trains; all else concerns the cell, its leader, and for the weights the core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cells.events import Role, TransferDone, TransferFailed
from cells.transfer import Acknowledged, Did, Do, End, Failed, Late, Outcome, Phase, TransferEvent, Undid, Undo, begin, on
from gyre_hpc.config import DeadlinesSection
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command, Prefix
from gyre_hpc.errors import Resumable
from gyre_hpc.events import EventLog
from gyre_hpc.gateway.client import ControlClient, PhaseFailed

logger = logging.getLogger(__name__)
Steps = Generator[None, None, "Answer"]

AT_GATEWAY = frozenset({Phase.UNROUTE, Phase.RESERVE, Phase.HOLD, Phase.HAND_OVER, Phase.ACKNOWLEDGE})
_COUNTS = {Phase.UNROUTE: ("executions",), Phase.RESERVE: ("placed",), Phase.HOLD: ("calls", "conversations")}
_GRACE = 5.0


@dataclass(frozen=True)
class Answer:
    """Whether an action succeeded, and what is known of it."""

    why: str | None
    """None: it did."""
    facts: Mapping[str, Any]
    late: bool = False


@dataclass(frozen=True)
class Order:
    """One transfer that was decided: weights for the engine's way back."""

    cell: int
    to: Role
    may_hold: bool
    version: int
    weights: str


@dataclass(frozen=True)
class Ended:
    """How it ended, with the seconds of each phase that was done, and what the gateway and the cell told of them."""

    end: End
    phases: Mapping[str, float]
    facts: Mapping[str, Any]
    seconds: float


class Transfers:
    """Carries out one at a time."""

    def __init__(self, asking: Asking, client: ControlClient, events: EventLog, deadlines: DeadlinesSection) -> None:
        self._asking, self._client, self._events, self._deadlines = asking, client, events, deadlines

    def run(self, order: Order) -> Generator[None, None, Ended]:
        """From the first action to the end. Raises Resumable where the gateway or a leader can't be reached."""
        began = time.monotonic()
        phases: dict[str, float] = {}
        facts: dict[str, Any] = {}
        state, action = begin(order.cell, order.to, order.may_hold)
        while not isinstance(action, End):
            since = time.monotonic()
            answer = yield from self.carry_out(action, order)
            seconds = round(time.monotonic() - since, 4)
            self._tell(action, order, answer, seconds)
            if isinstance(action, Do) and answer.why is None:
                phases[action.phase.value] = seconds
                facts.update(answer.facts)
            following = None
            for event in _events(action, answer):
                state, following = on(state, event)
            if following is None:
                raise RuntimeError(f"the transfer of cell {order.cell} does not go on after {action}")
            action = following
        return Ended(action, phases, facts, round(time.monotonic() - began, 4))

    def carry_out(self, action: Do | Undo, order: Order) -> Steps:
        """One action, to its answer."""
        phase, undo, cell = action.phase, isinstance(action, Undo), order.cell
        seconds = self._deadlines.of_phase(phase.value)
        if phase in AT_GATEWAY:
            if phase is Phase.RESERVE and order.may_hold and not undo:
                seconds = 0.01
            return (yield from self._at_gateway(partial(self._client.phase, cell, phase.value, seconds, undo)))
        match phase, undo:
            case Phase.RELEASE, False:
                return (yield from self._command(order, "release", seconds))
            case Phase.RELEASE, True:
                return (yield from self._serve(order, seconds))
            case Phase.RESTORE, False:
                return (yield from self._train(order, seconds))
            case Phase.RESTORE, True:
                return (yield from self._command(order, "offload", seconds))
            case Phase.JOIN, False:
                return (yield from self._prefix(cell + 1, seconds))
            case Phase.JOIN, True:
                return (yield from self._prefix(cell, seconds))
            case Phase.LEAVE, False:
                left = yield from self._prefix(cell, seconds)
                return left if left.why else (yield from self._command(order, "offload", seconds))
            case Phase.LEAVE, True:
                trains = yield from self._train(order, seconds)
                return trains if trains.why else (yield from self._prefix(cell + 1, seconds))
            case Phase.UPDATE, False:
                return (yield from self._command(order, "load", seconds))
            case Phase.UPDATE, True:
                return (yield from self._command(order, "release", seconds))
            case Phase.WAKE, False:
                return (yield from self._command(order, "resume", seconds))
            case Phase.WAKE, True:
                return (yield from self._command(order, "pause", seconds))
            case Phase.ROUTE, False:
                return (yield from self._route(order, seconds))
            case _:
                return (yield from self._at_gateway(partial(self._client.close_route, cell, seconds, hand_over=False)))

    # -- how ----------------------------------------------------------------------------------------------------------------------

    def _at_gateway(self, function: Any) -> Steps:
        try:
            facts: dict[str, Any] = yield from self._asking.call(function)
        except PhaseFailed as failed:
            return Answer(str(failed), {})
        return Answer(None, facts)

    def _command(self, order: Order, what: str, seconds: float) -> Steps:
        """Have the cell do it; an engine that has to be started again may take `deadlines.start` more."""
        message = Command(what, order.version, order.weights, seconds)
        patience = 1.5 * seconds + _GRACE + (self._deadlines.start if what in ("load", "resume") else 0.0)
        return _answer((yield from self._asking.ask(order.cell, message, what, patience)))

    def _serve(self, order: Order, seconds: float) -> Steps:
        """The engines have the published weights and serve; they may have moved."""
        for what in ("load", "resume"):
            done = yield from self._command(order, what, seconds)
            if done.why is not None or done.late:
                return done
        yield from set_routes(self._asking, self._client, order.cell, done.facts)
        return done

    def _train(self, order: Order, seconds: float) -> Steps:
        """The training state is on the device; a satellite gets the core's present weights, and the core goes on working meanwhile."""
        if order.cell:
            message = Command("lend", order.version, order.weights, seconds, order.cell)
            lent = _answer((yield from self._asking.ask(0, message, "the core's weights", self._deadlines.step)))
            if lent.late or lent.why is not None:
                return lent
        return (yield from self._command(order, "restore", seconds))

    def _prefix(self, cells: int, seconds: float) -> Steps:
        yield from self._asking.agree(Prefix(cells), f"a prefix of {cells} cells in training", max(seconds, self._deadlines.step))
        return Answer(None, {})

    def _route(self, order: Order, seconds: float) -> Steps:
        """Calls go there again, wherever its engines are now."""
        where = yield from self._command(order, "where", seconds)
        if where.why is not None:
            return where
        yield from set_routes(self._asking, self._client, order.cell, where.facts)
        yield from self._asking.call(partial(self._client.open_route, order.cell))
        return Answer(None, {})

    def _tell(self, action: Do | Undo, order: Order, answer: Answer, seconds: float) -> None:
        facts = {name: value for name, value in answer.facts.items() if name not in ("engines", "seconds", "handover")}
        handover = answer.facts.get("handover", {})
        self._events.emit(
            "transfer.phase",
            cell=order.cell,
            to=order.to.value,
            phase=action.phase.value,
            undo=isinstance(action, Undo),
            seconds=seconds,
            **facts,
            **({"bytes": handover["bytes"]} if "bytes" in handover else {}),
            **({"failed": "no answer" if answer.late else answer.why} if answer.late or answer.why else {}),
        )


def set_routes(asking: Asking, client: ControlClient, cell: int, facts: Mapping[str, Any]) -> Generator[None, None, None]:
    """The gateway knows where the engines of a cell are (`facts["engines"]`: by number); those that have not moved are left alone."""
    for number, fields in facts.get("engines", {}).items():
        address = {name: value for name, value in fields.items() if name != "pid"}
        yield from asking.call(partial(client.set_route, cell, address, int(number)))


def _answer(report: dict[str, Any] | None) -> Answer:
    if report is None:
        return Answer("no answer", {}, late=True)
    return Answer(report.get("failed"), {name: value for name, value in report.items() if name != "failed"})


def _events(action: Do | Undo, answer: Answer) -> list[TransferEvent]:
    """What the machine hears of an answer."""
    phase = action.phase
    if answer.late:
        return [Late(phase)]
    if answer.why is not None:
        return [Failed(phase, answer.why)]
    if isinstance(action, Undo):
        return [Undid(phase)]
    acknowledged = [Acknowledged(int(answer.facts["acknowledged"]))] if phase is Phase.ACKNOWLEDGE else []
    return [*acknowledged, Did(phase, sum(int(answer.facts.get(name, 0)) for name in _COUNTS.get(phase, ())))]


def tell(events: EventLog, order: Order, ended: Ended, live: int) -> TransferDone | TransferFailed:
    """The event of a transfer that is over, `live` executions at its begin; what the policy hears. Raises Resumable for a lost cell."""
    cell, to = order.cell, order.to
    source = Role.ROLLOUT if to is Role.TRAINING else Role.TRAINING
    fields = {"cell": cell, "from": source.value, "to": to.value, "seconds": ended.seconds, "phases": dict(ended.phases)}
    if ended.end.outcome is Outcome.LOST:
        raise Resumable(
            f"cell {cell} is lost on its way to {to.value}: {ended.end.why}", "see the cells' logs (mpi.log); the same command resumes"
        )
    if ended.end.outcome is Outcome.UNDONE:
        logger.warning("cell %d stays in %s: %s", cell, source.value, ended.end.why)
        events.emit("transfer.undone", **fields, why=ended.end.why)
        return TransferFailed(cell, to)
    facts = ended.facts
    moved = {name: facts.get(name, 0) for name in ("moved", "held")}
    handover = {"handover": facts["handover"]} if "handover" in facts else {}
    events.emit("transfer", **fields, **moved, live=live, **handover)
    return TransferDone(cell, to)
