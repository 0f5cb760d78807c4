"""One change of roles of one cell as a state machine: events in, at most one action out; pure, no clock, no I/O.

To training: unroute, reserve, hold, hand over, acknowledge, release, restore, join. Back to rollout: leave, update, wake, route.

| phase | what is true after it | its undo |
|---|---|---|
| unroute | the cell's engine gets no new calls | the route is open |
| reserve | every execution that lives there has a place at a cell that stays | the places are free |
| hold | its calls in flight are cancelled there, with their tokens, and wait | they go on wherever there is room |
| hand over | they go on elsewhere; KV travels, if the engines can do that | what is on its way is given up |
| acknowledge | each piece of KV at the source has arrived elsewhere, or was given up (its tokens suffice) | as before |
| release | the engine has freed weights and KV | the engine has the published weights again, and serves |
| restore | the training state is on the device, the core's weights are in it | it has left the device |
| join | the cell belongs to the training prefix, all leaders know | it belongs to it no more |
| leave | it belongs to it no more, and its training state has left the device | it is in training again |
| update | the engine has the published weights, checked | they are freed |
| wake | the engine serves | it is paused |
| route | it gets calls | it gets none |

Invariants:
- one action at a time: the next is given only when the one before was answered; an answer to anything else changes nothing;
- the engine is released only when nothing is owed: what HOLD counted was acknowledged or given up, piece by piece (`Acknowledged`);
- no more executions leave than have places elsewhere, unless the transfer `may_hold` (nobody promised places: async);
- a phase that fails is undone, for it may be half done, and so are those before it, last first; then the cell is where it was. An undo
  that fails, an answer that never comes and a death leave a cell of which nothing is known: it is lost;
- every transfer ends if each action is answered, or said to be late.

A phase's deadline is kept by who carries it out, and then it *fails*; whoever waits for the answer waits a little longer, and then it is
*late*. Ordering key: the phases' order, in which their events are emitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from cells.events import Role


class Phase(Enum):
    """What is done, one after the other."""

    UNROUTE = "unroute"
    RESERVE = "reserve"
    HOLD = "hold"
    HAND_OVER = "hand-over"
    ACKNOWLEDGE = "acknowledge"
    RELEASE = "release"
    RESTORE = "restore"
    JOIN = "join"
    LEAVE = "leave"
    UPDATE = "update"
    WAKE = "wake"
    ROUTE = "route"


ORDER: Mapping[Role, tuple[Phase, ...]] = {
    Role.TRAINING: tuple(Phase)[: tuple(Phase).index(Phase.LEAVE)],
    Role.ROLLOUT: tuple(Phase)[tuple(Phase).index(Phase.LEAVE) :],
}


class Outcome(Enum):
    """How a transfer ended: as asked for; the cell is where it was; nothing is known of the cell."""

    DONE = "done"
    UNDONE = "undone"
    LOST = "lost"


# -- events -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Did:
    """`phase` is done. `count`: after UNROUTE the executions that live there, after RESERVE those of them that have a place elsewhere,
    after HOLD the pieces of KV (calls and conversations) that are owed."""

    phase: Phase
    count: int = 0


@dataclass(frozen=True)
class Acknowledged:
    """`count` more pieces have arrived elsewhere, or were given up."""

    count: int


@dataclass(frozen=True)
class Undid:
    """The undo of `phase` is done."""

    phase: Phase


@dataclass(frozen=True)
class Failed:
    """`phase`, or its undo, did not succeed; it may be half done, and nothing of it is under way any more."""

    phase: Phase
    why: str


@dataclass(frozen=True)
class Late:
    """Nobody has answered to `phase` or its undo: what is under way there is not known."""

    phase: Phase


@dataclass(frozen=True)
class CellDied:
    """A process of the cell ended, and can't be replaced."""

    why: str


TransferEvent = Did | Acknowledged | Undid | Failed | Late | CellDied


# -- actions ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Do:
    """Carry out `phase`; answered by Did or Failed."""

    phase: Phase


@dataclass(frozen=True)
class Undo:
    """Take `phase` back, whether it was done whole, in part or not at all; answered by Undid or Failed."""

    phase: Phase


@dataclass(frozen=True)
class End:
    """Nothing more is to be done."""

    outcome: Outcome
    why: str = ""


Action = Do | Undo | End


@dataclass(frozen=True)
class TransferState:
    """Where a transfer is."""

    cell: int
    to: Role
    may_hold: bool = False
    at: Phase | None = None
    """Under way: being done, or `undoing`. None before the begin and after the end."""
    undoing: bool = False
    done: tuple[Phase, ...] = ()
    """Done and not taken back, in order."""
    living: int = 0
    """Executions that lived at the source when its route closed."""
    placed: int = 0
    """Of them those with a place elsewhere."""
    owed: int = 0
    """Pieces of KV that only the source has."""
    outcome: Outcome | None = None
    why: str = ""


def begin(cell: int, to: Role, may_hold: bool = False) -> tuple[TransferState, Action]:
    """The first action of a transfer. `may_hold`: calls without a place elsewhere may wait until a route opens."""
    return _do(TransferState(cell, to, may_hold), ORDER[to][0])


def on(state: TransferState, event: TransferEvent) -> tuple[TransferState, Action | None]:
    """What to do about `event`; None: wait on."""
    if state.outcome is not None:
        return state, None
    if isinstance(event, CellDied):
        return _lost(state, event.why)
    if isinstance(event, Acknowledged):
        return replace(state, owed=max(0, state.owed - event.count)), None
    if event.phase is not state.at:
        return state, None
    if isinstance(event, Late):
        return _lost(state, f"{'the undo of ' if state.undoing else ''}{event.phase.value} was not answered")
    if isinstance(event, Undid):
        return _undo_next(state) if state.undoing else (state, None)
    if isinstance(event, Failed):
        if state.undoing:
            return _lost(state, f"{state.why}; the undo of {event.phase.value} failed: {event.why}")
        return _fail(state, event.why)
    return (state, None) if state.undoing else _after(state, event)


def _after(state: TransferState, event: Did) -> tuple[TransferState, Action]:
    """The phase under way is done: look at what it found, and go on."""
    match event.phase:
        case Phase.UNROUTE:
            state = replace(state, living=event.count)
        case Phase.RESERVE:
            state = replace(state, placed=event.count)
            if event.count < state.living and not state.may_hold:
                return _fail(state, f"only {event.count} of {state.living} executions have a place elsewhere")
        case Phase.HOLD:
            state = replace(state, owed=event.count)
        case Phase.ACKNOWLEDGE if state.owed:
            return _fail(state, f"{state.owed} hand-overs were not acknowledged")
    done, order = (*state.done, event.phase), ORDER[state.to]
    state = replace(state, done=done)
    if len(done) < len(order):
        return _do(state, order[len(done)])
    return replace(state, at=None, outcome=Outcome.DONE), End(Outcome.DONE)


def _do(state: TransferState, phase: Phase) -> tuple[TransferState, Action]:
    return replace(state, at=phase), Do(phase)


def _fail(state: TransferState, why: str) -> tuple[TransferState, Action]:
    assert state.at is not None
    return replace(state, undoing=True, why=f"{state.at.value}: {why}"), Undo(state.at)


def _undo_next(state: TransferState) -> tuple[TransferState, Action]:
    if not state.done:
        return replace(state, at=None, outcome=Outcome.UNDONE), End(Outcome.UNDONE, state.why)
    return replace(state, at=state.done[-1], done=state.done[:-1]), Undo(state.done[-1])


def _lost(state: TransferState, why: str) -> tuple[TransferState, Action]:
    return replace(state, at=None, outcome=Outcome.LOST, why=why), End(Outcome.LOST, why)
