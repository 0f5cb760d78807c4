"""A world for the policy: carries out its decisions in any order that a caller draws, and checks what must always hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

from cells.events import (
    CapacityChanged,
    Claimed,
    CloseStep,
    Decision,
    Dispatch,
    Drop,
    Event,
    ExecutionFinished,
    Feed,
    Finish,
    GroupComplete,
    GroupDispatched,
    GroupFrontier,
    Mode,
    Publish,
    Published,
    Role,
    Schedule,
    StepDone,
    Transfer,
    TransferDone,
    TransferFailed,
)
from cells.policies import make_policy

Draw = Callable[[int], int]
"""A number in 0..n-1."""


class World:
    """`draw` chooses which pending thing happens next; `void` and `fails` say whether a group or a transfer goes wrong, `mortal` whether
    engines die and come back."""

    def __init__(self, schedule: Schedule, draw: Draw, void: Callable[[], bool], fails: Callable[[], bool], mortal: bool = False) -> None:
        self.schedule, self.draw, self.void, self.fails, self.mortal = schedule, draw, void, fails, mortal
        self.deaths = 0
        self.policy = make_policy(schedule)
        self.saved = self.saving = self.policy.snapshot()
        self.groups: dict[int, GroupFrontier] = {}
        """Every group, as the ledger would tell it."""
        self.step = self.published = 0
        self.steps: list[list[int]] = []
        """Groups of every step that is done."""
        self.trained: set[int] = set()
        self.dropped: set[int] = set()
        self.checkpoint_every = 1
        self.made = 0
        self.line = [0]
        """The weights of now and those that led to them, oldest first: numbers that no two weights have."""
        self.born: dict[int, list[int]] = {}
        """Of each group: the same for the weights under which it was dispatched."""
        self.over = False
        self.restarts = 0
        self._boot()

    def _boot(self) -> None:
        self.roles = [Role.ROLLOUT] * len(self.schedule.capacity)
        self.held = [*self.schedule.capacity, self.schedule.standalone_capacity]
        """What the engines of each cell hold that live, and the standalone pool's."""
        self.excess = 0
        """Unfinished executions beyond what serves, since engines died."""
        self.transfer: Transfer | None = None
        self.pending: list[Event] = []
        self.dispatches: list[int] = []
        self.fed: list[int] = []
        self.claimants: set[int] = set()
        """Cells that may have a part of the open step's gradient."""
        self.closing = self.publishing = False
        self.left_in: int | None = None
        """The burst in which cells left rollout last; None once none of them is away (the core's transfer was undone)."""
        self.stayed_in: int | None = None
        """The burst that began with a core which stayed over its boundary."""
        self.claimed = self.waiting = 0
        self.leftover = sum(g.size - g.finished for g in self.groups.values())
        """Unfinished executions that a restart found: they may be more than async's rollout cells hold."""

    # -- what happens ---------------------------------------------------------------------------------------------------------

    def run(self, most: int = 200_000) -> None:
        self.carry_out(self.policy.start())
        for _ in range(most):
            if self.over:
                return
            self.happen()
        raise AssertionError("the run does not end")

    def happen(self) -> None:
        unfinished = [g for g in self.groups.values() if g.finished < g.size]
        claims = self.schedule.join_late and not self.closing and self.claimed < len(self.fed)
        choices = len(self.pending) + len(unfinished) + bool(self.dispatches) + claims
        assert choices or self.dead, f"nothing can happen any more: phase {self.policy.phase}, roles {self.roles}, fed {self.fed}"
        at = self.draw(choices + self.mortal)
        if at < len(self.pending):
            self.deliver(self.pending.pop(at))
        elif at < len(self.pending) + len(unfinished):
            self.finish_one(unfinished[at - len(self.pending)])
        elif self.dispatches and at == len(self.pending) + len(unfinished):
            self.dispatch_one()
        elif at < choices:
            self.claim()
        else:
            self.change_an_engine()
        # a group has a slot until it is declared complete: it may have to be replaced
        held = sum(max(1, g.size - g.finished) for g in self.groups.values() if g.valid is None)
        assert self.policy.waterlevel == held + len(self.dispatches) * self.schedule.group_size, "the policy's count is not the ledger's"

    @property
    def dead(self) -> bool:
        return self.held != [*self.schedule.capacity, self.schedule.standalone_capacity]

    def change_an_engine(self) -> None:
        """One of a cell's engines, or all of them, die; or they are back."""
        cell = self.draw(len(self.held))
        whole = self.schedule.capacity[cell] if cell < len(self.roles) else self.schedule.standalone_capacity
        self.held[cell] = self.draw(whole) if whole and self.held[cell] == whole else whole
        self.deaths += self.held[cell] < whole
        self.excess = max(self.excess, self.waterlevel() - self.rollout_capacity())
        self.tell(CapacityChanged(cell if cell < len(self.roles) else None, self.held[cell]))

    def claim(self) -> None:
        """The training cells claim the work of some further groups."""
        self.claimed += 1 + self.draw(len(self.fed) - self.claimed)
        self.tell(Claimed(self.step + 1, self.claimed))

    def finish_one(self, group: GroupFrontier) -> None:
        finished = group.finished + 1
        over = finished == group.size
        self.groups[group.group] = replace(group, finished=finished)
        self.tell(ExecutionFinished(group.group))
        if over:  # that it is complete may be told later
            self.pending.append(GroupComplete(group.group, 0 if self.void() else max(1, group.size - self.draw(2))))

    def dispatch_one(self) -> None:
        version = self.dispatches.pop(0)
        group = GroupFrontier(len(self.groups), version, self.schedule.group_size)
        self.groups[group.group] = group
        self.born[group.group] = self.line[: version + 1]
        self.tell(GroupDispatched(group.group, version, group.size))

    def deliver(self, event: Event) -> None:
        match event:
            case TransferDone(cell, to):
                self.transfer = None
                self.roles[cell] = to
                self.note_claimants()
            case TransferFailed():
                self.transfer = None
                if Role.TRAINING not in self.roles:
                    self.left_in = None
            case StepDone(step):
                self.closing = False
                self.note_step(step)
                self.fed = []
                self.claimed = 0
                self.claimants = set()
            case Published(version):
                self.published, self.publishing = version, False
                self.waiting = len(self.ready())
            case GroupComplete():
                self.note_complete(event)
        self.tell(event)

    def note_complete(self, event: GroupComplete) -> None:
        self.groups[event.group] = replace(self.groups[event.group], valid=event.valid)

    def crash(self) -> None:
        """The MPI world is lost; the ledger and the last checkpoint stay. A closing step may have reached its checkpoint, or not."""
        self.restarts += 1
        for event in self.pending:
            if isinstance(event, GroupComplete):  # what the policy was not told any more is in the ledger
                self.note_complete(event)
        if self.closing and self.draw(2):
            self.note_step(self.step + 1)
        self._go_back(self.saved["step"])
        self._boot()
        self.published = self.step
        self.policy = make_policy(self.schedule, self.saved)
        self.carry_out(self.policy.resume(self.groups.values()))

    def stop(self) -> None:
        """The last step that is done is saved, whatever is decided and not carried out, and the run goes on from there."""
        self.saved = json.loads(json.dumps(self.policy.snapshot(given_up=True)))
        assert self.saved["step"] == self.step
        self.closing = False
        self.crash()

    def _go_back(self, step: int) -> None:
        """The steps after the last checkpoint are lost, but nothing that the ledger has: versions after it count backwards."""
        self.step, self.steps, self.line = step, self.steps[:step], self.line[: step + 1]
        self.trained = {group for groups in self.steps for group in groups}
        self.dropped = {group for group in self.dropped if group < self.saved["consumed_below"] or group in self.saved["consumed"]}
        for group, known in self.groups.items():
            if known.version > step:
                self.groups[group] = replace(known, version=2 * step - known.version)

    def updates_since(self, group: int) -> int:
        """Updates between the weights of a group's dispatch and those of now, back to where they part and on from there."""
        common = sum(a == b for a, b in zip(self.born[group], self.line, strict=False))
        return len(self.born[group]) - common + len(self.line) - common

    # -- what the policy decides -----------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.carry_out(self.policy.on(event))
        self.check_through()

    def check_through(self) -> None:
        """From the first cell that leaves rollout to the burst's end, through every transfer: what serves holds what is unfinished, and
        where engines died the rest is asked to hold no more than was unfinished then.

        (A boundary dispatches while cells are on their way back, with every cell in rollout skipped groups are replaced as at a boundary,
        and async queues what has no slot.)
        """
        core_alone = self.roles == [Role.TRAINING] + [Role.ROLLOUT] * (len(self.roles) - 1) and self.transfer is None
        if self.schedule.mode is Mode.ELASTIC and core_alone and self.policy.burst not in (self.left_in, self.stayed_in):
            assert self.waiting >= self.schedule.groups_per_step, "the core stays though no batch waits"
            self.stayed_in = self.policy.burst
            self.left_in = self.left_in if self.mortal else self.policy.burst
        if self.left_in == self.policy.burst and self.schedule.mode is not Mode.ASYNC:
            over = max(0, self.waterlevel() - self.rollout_capacity())
            assert over <= self.excess, "unfinished executions without a slot in mid-burst"
            self.excess = over
        else:
            self.excess = 0

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert not self.over
            match decision:
                case Dispatch(groups, version):
                    assert groups > 0
                    assert version == self.published
                    self.dispatches += [version] * groups
                    self.check_outstanding()
                case Transfer():
                    self.begin_transfer(decision)
                case Feed(group):
                    self.feed(group)
                case Drop(group):
                    self.drop(group)
                case CloseStep(step):
                    self.close(step)
                case Publish(version):
                    assert version == self.step
                    assert self.transfer is None
                    self.publishing = True
                    self.pending.append(Published(version))
                case Finish():
                    assert self.step == self.published == self.schedule.steps
                    self.over = True

    def check_outstanding(self) -> None:
        """A dispatch brings what no step has up to (phi + mu) batches at most, and to no more than the steps left can take."""
        fed = len(self.fed) if not self.closing else 0
        taken = {*self.fed, *self.trained, *self.dropped}
        outstanding = len(self.dispatches) + sum(g.group not in taken and g.valid != 0 for g in self.groups.values())
        left = (self.schedule.steps - self.step) * self.schedule.groups_per_step - fed
        most = math.ceil((self.schedule.phi + self.schedule.mu) * self.schedule.groups_per_step - 1e-9)
        assert outstanding <= min(left, most), "more than the boundary may ask for"

    def begin_transfer(self, transfer: Transfer) -> None:
        assert self.transfer is None, "two transfers at once"
        assert not self.closing, "a transfer while a step closes"
        assert not self.publishing, "a transfer during a publication"
        assert self.roles[transfer.cell] is not transfer.to
        prefix = self.roles.count(Role.TRAINING)
        assert self.roles == [Role.TRAINING] * prefix + [Role.ROLLOUT] * (len(self.roles) - prefix), "not a prefix"
        if transfer.to is Role.TRAINING:
            assert transfer.cell == prefix < self.schedule.training_cells
            self.check_capacity(transfer.cell)
            last = self.step + 1 >= min(self.published + self.schedule.mu, self.schedule.steps)
            done = len(self.fed) == self.schedule.groups_per_step == self.claimed
            assert not (self.schedule.join_late and last and done), "a cell joins a burst of which nothing is left"
            self.left_in = self.policy.burst
        else:
            assert self.schedule.mode is not Mode.ASYNC, "a cell of a fixed pool returns"
            assert transfer.cell == prefix - 1
            assert transfer.cell not in self.claimants, "a cell leaves with a part of the gradient"
        self.transfer = transfer
        outcome = TransferFailed if self.fails() else TransferDone
        self.pending.append(outcome(transfer.cell, transfer.to))

    def check_capacity(self, cell: int) -> None:
        """A cell may leave: what remains holds every unfinished execution; under colocate what never trains does."""
        left = self.rollout_capacity() - self.held[cell]
        if self.schedule.mode is Mode.COLOCATE:
            left = sum(self.held[self.schedule.training_cells :])
        if self.schedule.mode is Mode.ASYNC:
            assert not self.dispatches, "async transfers before it dispatches"
            assert self.waterlevel() <= self.leftover
        else:
            assert self.waterlevel() <= left, "the cells that remain can't hold what is unfinished"

    def feed(self, group: int) -> None:
        frontier = self.groups[group]
        assert self.roles[0] is Role.TRAINING, "fed while the core does not train"
        assert not self.closing
        assert frontier.valid, "an incomplete or void group was fed"
        assert group not in self.fed
        assert group not in self.trained, "fed twice"
        ready = self.ready()
        assert (frontier.version, group) == min((g.version, g.group) for g in ready), "not the oldest complete group"
        if not self.schedule.streaming and not self.fed and self.step == self.burst_start():
            whole = min(self.schedule.mu, self.schedule.steps - self.step) * self.schedule.groups_per_step
            assert len(ready) >= whole, "training began before the burst was complete"
        self.fed.append(group)
        self.note_claimants()
        bound = self.schedule.staleness_bound
        assert self.step - frontier.version == self.updates_since(group) >= 0
        if bound is not None:
            assert self.updates_since(group) <= bound, "too stale"

    def drop(self, group: int) -> None:
        assert self.schedule.staleness_bound is not None
        assert self.groups[group].valid
        assert group not in {*self.fed, *self.trained, *self.dropped}
        assert self.updates_since(group) > self.schedule.staleness_bound, "it would have been in time"
        assert self.checkpoint_every > 1, "dropped though nothing was lost"
        self.dropped.add(group)

    def burst_start(self) -> int:
        """The step after which the present burst began: weights are published at bursts' ends."""
        return self.published

    def note_step(self, step: int) -> None:
        self.step = step
        if step % self.checkpoint_every == 0 or step == self.schedule.steps:
            self.saved = self.saving
        self.made += 1
        self.line = [*self.line, self.made]
        self.steps.append(self.fed)
        self.trained |= set(self.fed)

    def note_claimants(self) -> None:
        if self.fed:
            self.claimants |= {cell for cell, role in enumerate(self.roles) if role is Role.TRAINING}

    def close(self, step: int) -> None:
        assert step == self.step + 1
        assert self.transfer is None
        assert 0 < len(self.fed) <= self.schedule.groups_per_step
        assert not self.schedule.join_late or self.claimed == len(self.fed), "closed before all work was claimed"
        if len(self.fed) < self.schedule.groups_per_step:  # a short step: nothing else could come
            assert not self.dispatches
            assert all(g.valid is not None for g in self.groups.values())
            assert self.rollout_capacity() < self.schedule.group_size
        self.closing = True
        self.saving = json.loads(json.dumps(self.policy.snapshot()))
        self.pending.append(StepDone(step))

    # -- measures -------------------------------------------------------------------------------------------------------------

    def ready(self) -> list[GroupFrontier]:
        """Complete groups that no step has."""
        return [g for g in self.groups.values() if g.valid and g.group not in {*self.fed, *self.trained, *self.dropped}]

    def waterlevel(self) -> int:
        return sum(g.size - g.finished for g in self.groups.values()) + len(self.dispatches) * self.schedule.group_size

    def rollout_capacity(self) -> int:
        moving = self.transfer.cell if self.transfer is not None else None
        cells = (c for k, c in enumerate(self.held[:-1]) if self.roles[k] is Role.ROLLOUT and k != moving)
        return self.held[-1] + sum(cells)
