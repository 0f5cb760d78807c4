"""The transfer's rules under any order of answers, acknowledgements, failures and deaths: a model of gateway, cells and engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.events import Role
from cells.transfer import (
    ORDER,
    Acknowledged,
    Action,
    CellDied,
    Did,
    Do,
    End,
    Failed,
    Late,
    Outcome,
    Phase,
    TransferEvent,
    TransferState,
    Undid,
    Undo,
    begin,
    on,
)

TRAINING, ROLLOUT = Role.TRAINING, Role.ROLLOUT


@dataclass
class World:
    """What is really so, while the machine says what to do. The cell's own things are true or false; peers have room."""

    to: Role
    chance: random.Random
    rooms: list[int]
    """Free places of each cell that stays."""
    living: int
    trouble: float
    may_hold: bool = False
    routed: bool = True
    engine: bool = True
    """Has its memory."""
    awake: bool = True
    trains: bool = False
    joined: bool = False
    reserved: list[int] = field(default_factory=list)
    """Of each place that was reserved: at which peer."""
    on_the_way: int = 0
    """Pieces that only the source has."""
    outstanding: Action | None = None
    fatal: bool = False
    """Something happened after which a cell may be lost."""

    def __post_init__(self) -> None:
        if self.to is ROLLOUT:
            self.routed, self.engine, self.awake, self.trains, self.joined = False, False, False, True, True

    def run(self) -> tuple[TransferState, End]:
        """Until the end; at most so many actions as there are phases, each done and undone."""
        state, action = begin(1, self.to, self.may_hold)
        for _ in range(2 * len(ORDER[self.to]) + 1):
            if isinstance(action, End):
                return state, action
            self.outstanding = action
            for event in self.answers(action):
                state, following = on(state, event)
                assert following is None or self.outstanding is not None, "one action at a time"
                if following is not None:
                    self.outstanding, action = None, following
        raise AssertionError(f"does not end: {state}")

    def answers(self, action: Do | Undo) -> list[TransferEvent]:
        """What happens until `action` is answered: stale and foreign answers among it."""
        phase = action.phase
        noise = [Did(p, 3) for p in Phase if p is not phase and self.chance.random() < 0.05]
        noise += [Undid(p) for p in Phase if (p is not phase or isinstance(action, Do)) and self.chance.random() < 0.05]
        draw = self.chance.random()
        if draw < self.trouble / 4:
            self.fatal = True
            return [*noise, CellDied("killed") if self.chance.random() < 0.5 else Late(phase)]
        if draw < self.trouble:
            if isinstance(action, Undo):
                self.fatal = True
            elif self.chance.random() < 0.5:
                self.do(phase)  # half done is done, to the machine
            return [*noise, Failed(phase, "trouble")]
        if isinstance(action, Undo):
            self.undo(phase)
            return [*noise, Undid(phase)]
        return [*noise, *self.do(phase)]

    def do(self, phase: Phase) -> list[TransferEvent]:
        count = 0
        match phase:
            case Phase.UNROUTE:
                self.routed, count = False, self.living
            case Phase.RESERVE:
                assert not self.routed
                for _ in range(self.living):
                    free = [peer for peer, room in enumerate(self.rooms) if room > 0]
                    if free:
                        self.rooms[free[-1]] -= 1
                        self.reserved.append(free[-1])
                count = len(self.reserved)
            case Phase.HOLD:
                assert self.may_hold or len(self.reserved) >= self.living, "nobody leaves who has no place"
                count = self.on_the_way = self.chance.randint(0, 2 * self.living)
            case Phase.HAND_OVER:
                return [*self.arrive(), Did(phase)]
            case Phase.ACKNOWLEDGE:
                events = self.arrive()
                if self.on_the_way and self.chance.random() > self.trouble:
                    events.append(Acknowledged(self.on_the_way))
                    self.on_the_way = 0
                return [*events, Did(phase)]
            case Phase.RELEASE:
                assert self.on_the_way == 0, "nothing is freed before a peer has it"
                assert not self.routed
                self.engine = self.awake = False
            case Phase.RESTORE:
                assert not self.engine, "one device holds one of the two"
                self.trains = True
            case Phase.JOIN:
                assert self.trains
                self.joined = True
            case Phase.LEAVE:
                self.joined = self.trains = False
            case Phase.UPDATE:
                assert not self.trains
                self.engine = True
            case Phase.WAKE:
                assert self.engine
                self.awake = True
            case Phase.ROUTE:
                assert self.awake, "calls go to an engine that serves"
                self.routed = True
        return [Did(phase, count)]

    def arrive(self) -> list[TransferEvent]:
        some = self.chance.randint(0, self.on_the_way)
        self.on_the_way -= some
        return [Acknowledged(1)] * some

    def undo(self, phase: Phase) -> None:
        match phase:
            case Phase.UNROUTE:
                assert self.engine
                self.routed = True
            case Phase.RESERVE:
                for peer in self.reserved:
                    self.rooms[peer] += 1
                self.reserved = []
            case Phase.HOLD | Phase.HAND_OVER | Phase.ACKNOWLEDGE:
                self.on_the_way = 0
            case Phase.RELEASE:
                assert not self.trains
                self.engine = self.awake = True
            case Phase.RESTORE:
                self.trains = False
            case Phase.JOIN:
                self.joined = False
            case Phase.LEAVE:
                assert not self.engine
                self.joined = self.trains = True
            case Phase.UPDATE:
                self.engine = False
            case Phase.WAKE:
                self.awake = False
            case Phase.ROUTE:
                self.routed = False


@settings(max_examples=1000)
@given(
    st.sampled_from(Role),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 6), max_size=3),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.booleans(),
)
def test_any_order_of_events_keeps_the_rules_and_ends(
    to: Role, seed: int, rooms: list[int], living: int, trouble: float, may_hold: bool
) -> None:
    world = World(to, random.Random(seed), list(rooms), living, trouble, may_hold)
    state, end = world.run()
    assert state.outcome is end.outcome
    assert min(world.rooms, default=0) >= 0, "no cell is asked to hold more than it can"
    if end.outcome is Outcome.LOST:
        assert world.fatal
        return
    assert not world.fatal
    trains = (to is TRAINING) == (end.outcome is Outcome.DONE)
    assert (world.trains, world.joined) == (trains, trains)
    assert (world.routed, world.engine, world.awake) == (not trains,) * 3
    if end.outcome is Outcome.UNDONE:
        assert world.rooms == rooms, "places are given back"
        assert end.why
    if trouble == 0.0:
        short = to is TRAINING and living > sum(rooms) and not may_hold
        assert end.outcome is (Outcome.UNDONE if short else Outcome.DONE)


def test_the_phases_of_both_ways() -> None:
    assert [phase.value for phase in ORDER[TRAINING]] == [
        "unroute",
        "reserve",
        "hold",
        "hand-over",
        "acknowledge",
        "release",
        "restore",
        "join",
    ]
    assert [phase.value for phase in ORDER[ROLLOUT]] == ["leave", "update", "wake", "route"]


def _follow(to: Role, *events: TransferEvent, may_hold: bool = False) -> list[Action]:
    state, action = begin(2, to, may_hold)
    actions = [action]
    for event in events:
        state, following = on(state, event)
        actions += [following] if following is not None else []
    return actions


def test_what_is_owed_is_not_released_and_the_way_back_is_the_way_in() -> None:
    to_hold = (Did(Phase.UNROUTE, 2), Did(Phase.RESERVE, 2), Did(Phase.HOLD, 3), Did(Phase.HAND_OVER), Acknowledged(2))
    actions = _follow(TRAINING, *to_hold, Did(Phase.ACKNOWLEDGE))
    assert actions[-1] == Undo(Phase.ACKNOWLEDGE)
    undone = [Undid(phase) for phase in reversed(ORDER[TRAINING][:5])]
    assert _follow(TRAINING, *to_hold, Did(Phase.ACKNOWLEDGE), *undone)[-5:] == [
        *(Undo(phase) for phase in reversed(ORDER[TRAINING][:4])),
        End(Outcome.UNDONE, "acknowledge: 1 hand-overs were not acknowledged"),
    ]
    assert _follow(TRAINING, *to_hold, Acknowledged(1), Did(Phase.ACKNOWLEDGE))[-1] == Do(Phase.RELEASE)


def test_executions_without_a_place_keep_the_cell_in_rollout_unless_they_may_wait() -> None:
    short = (Did(Phase.UNROUTE, 4), Did(Phase.RESERVE, 3))
    assert _follow(TRAINING, *short)[-1] == Undo(Phase.RESERVE)
    assert _follow(TRAINING, *short, may_hold=True)[-1] == Do(Phase.HOLD)


@pytest.mark.parametrize("event", [Late(Phase.LEAVE), CellDied("signal 9")])
def test_of_a_cell_that_is_silent_or_dead_nothing_is_known(event: TransferEvent) -> None:
    action = _follow(ROLLOUT, event, Did(Phase.LEAVE))[-1]
    assert isinstance(action, End)
    assert action.outcome is Outcome.LOST
