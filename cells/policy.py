"""What all schedules have in common, as one pure object: events in, decisions out; no clock, no I/O. The controller and the simulator
run it alike. Who trains when is said by its subclasses (cells/policies.py) in four small methods.

A burst: top the outstanding groups up (`Dispatch`, the only place where the waterlevel rises on purpose) -> the first cells train, as
the mode has it -> complete groups are fed to the open step -> `CloseStep`, mu times -> `Publish` -> cells return, last first -> the
next burst.

Invariants:
- the cells in training are a prefix; one transfer at a time; none between `CloseStep` and `StepDone` or during a publication;
- nothing is fed while cells of the last burst are on their way back: what is fed may be claimed by every cell in training, and one
  that leaves would take its part of the gradient along. So the training set only grows between the first `Feed` of a step and its end;
- without streaming nothing is fed before all groups that the burst needs are complete;
- every group is fed once, or skipped once (no valid execution in it), or dropped once (a resume that gave up steps left it too old);
  a step is made of `groups_per_step` fed groups, see below;
- an engine that died holds nothing until it is back (`CapacityChanged`): no cell leaves, and nothing is replaced, on the strength of its
  slots. What runs may be more than the rest holds then; the policy adds nothing to that before a burst's boundary;
- every run ends if its executions do, its transfers succeed in the end and some groups are valid.

Choices where the design is silent:
- a cell that may join does so before the step is closed: at the scale that matters a transfer is short against a step. With
  `join_late` the step also stays open until its work is claimed, so that a cell which comes free meanwhile still helps; nobody joins the
  last step of a burst for nothing. The simulator says what that is worth (docs/simulation.md);
- a skipped group is replaced at once as far as rollout can hold the replacement: what the boundary asked for stays outstanding, less what
  was fed since. (Replacing only what the burst itself lacks uses up the phi batches first, and then waits for replacements at its end; what
  that costs: docs/simulation.md.) When rollout can't hold one (all cells are in training), the open step is closed short, or, with
  nothing fed, the burst ends early: returning a cell in mid-burst would break the rule above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from cells.burst import Backlog, Consumed, boundary_target, holds_back
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
    Publish,
    Published,
    Role,
    Schedule,
    StepDone,
    TransferDone,
    TransferFailed,
)
from cells.moves import Moves
from cells.openstep import OpenStep
from cells.roles import Roles
from cells.schedule import ScheduleStuck, check_schedule
from cells.waterlevel import groups_that_fit, rollout_capacity

SKIPPED_BATCHES = 4
"""So many batches' worth of groups in a row (16 groups at least) without one valid execution can't be bad luck."""


class Phase(Enum):
    """Where a run is."""

    NEW = "new"
    BURST = "burst"
    CLOSING = "closing"
    PUBLISHING = "publishing"
    DONE = "done"


class Policy(ABC):
    """Decides for one run. Feed it events in the order in which they happened, carry its decisions out in the order given.

    `snapshot`: what `snapshot()` returned for the checkpoint from which the run goes on.
    """

    keeps_satellites = False
    """Whether satellites stay in training over a burst's boundary (they need the new weights then)."""
    keeps_spare = True
    """Whether a skipped group is replaced that the burst itself would not lack."""

    def __init__(self, schedule: Schedule, snapshot: Mapping[str, Any] | None = None) -> None:
        check_schedule(schedule)
        saved = snapshot if snapshot is not None else {}
        self.schedule = schedule
        """Its capacities are those of the engines that live (`CapacityChanged`)."""
        self.step: int = saved.get("step", 0)
        """Optimizer steps done; equals the version of the newest weights."""
        self.published = self.step
        """Version that the engines have (after a restart they begin with the checkpoint's)."""
        self.burst: int = saved.get("burst", -1)
        """Index of the current burst."""
        self.skipped: int = saved.get("skipped", 0)
        """Groups that were dropped because no execution of them was valid."""
        self.dropped = 0
        """Groups of this attempt that no step could take within the bound on the staleness."""
        self.skipped_in_a_row = 0
        """Complete groups since the last one with a valid execution: many of them mean that something outside is broken."""
        self.phase = Phase.NEW
        self._backlog = Backlog(Consumed(saved.get("consumed_below", 0), saved.get("consumed", ())))
        self._moves = Moves(len(schedule.capacity))
        self._step = OpenStep(schedule.groups_per_step)
        self._open = False
        """Whether training of this burst may begin (`_begins`); stays true to the burst's end."""
        self._asked = 0
        """Groups of Dispatch decisions that were not answered yet."""
        self._burst_end: int = self.step
        self._goal = 0
        """Groups to be outstanding now: what the boundary topped up to, less what was fed since, or might have been in a short step."""

    # -- the caller's side --------------------------------------------------------------------------------------------------------

    def start(self) -> list[Decision]:
        """The first decisions of a run without earlier groups."""
        return self.resume(())

    def resume(self, frontier: Iterable[GroupFrontier]) -> list[Decision]:
        """The first decisions after a restart: a burst's boundary, all cells in rollout, `frontier` what the ledger holds.

        Groups fed to a step that the checkpoint does not have are fed again.
        """
        if self.phase is not Phase.NEW:
            raise ValueError("a policy is started once")
        self._backlog.restore(frontier)
        self._skip_void()
        if self.step >= self.schedule.steps:
            self.phase = Phase.DONE
            return [Finish()]
        return self._begin_burst() + self._advance()

    def on(self, event: Event) -> list[Decision]:
        """What to do about `event`. ValueError for an answer to something that was not asked, KeyError for an unknown group."""
        decisions = _HANDLERS[type(event)](self, event)
        return decisions + self._advance()

    def snapshot(self, given_up: bool = False) -> dict[str, Any]:
        """JSON-able state for the checkpoint of the step that is closing (or, between steps, of the last one).

        While a step is closing it counts as done, with its groups: the checkpoint holds the weights after it. `given_up`: its `CloseStep`
        is never carried out, and the checkpoint is of the last step that is done.
        """
        closing = self.phase is Phase.CLOSING and not given_up
        consumed = self._backlog.consumed.with_groups(self._step.groups if closing else ())
        return {
            "step": self.step + closing,
            "burst": self.burst,
            "skipped": self.skipped,
            "consumed_below": consumed.below,
            "consumed": consumed.above,
        }

    @property
    def roles(self) -> Roles:
        """What every cell does."""
        return self._moves.roles

    @property
    def current(self) -> tuple[int, ...]:
        """Groups fed to the open (or closing) step."""
        return self._step.groups

    @property
    def fed(self) -> int:
        """How many groups `current` has."""
        return len(self._step)

    @property
    def closes_burst(self) -> bool:
        """Whether the open (or closing) step is the last of its burst (a burst that runs out of groups ends even earlier)."""
        return self.step + 1 >= self._burst_end

    @property
    def waterlevel(self) -> int:
        """Executions dispatched (asked for included) and not finished."""
        return self._backlog.waterlevel + self._asked * self.schedule.group_size

    @property
    def capacity(self) -> int:
        """Rollout slots now."""
        return rollout_capacity(self.schedule, self.roles)

    @property
    def outstanding(self) -> int:
        """Groups dispatched (asked for included) and neither fed nor skipped."""
        return len(self._backlog) + self._asked

    # -- events -------------------------------------------------------------------------------------------------------------------

    def _on_dispatched(self, event: GroupDispatched) -> list[Decision]:
        if self._backlog.dispatched(event.group, event.version, event.size):
            self._asked = max(0, self._asked - 1)
        return []

    def _on_finished(self, event: ExecutionFinished) -> list[Decision]:
        if event.group not in self._step:
            self._backlog.finished(event.group)
        return []

    def _on_complete(self, event: GroupComplete) -> list[Decision]:
        if event.group not in self._step:
            self._backlog.complete(event.group, event.valid)
            self.skipped_in_a_row = 0 if event.valid else self.skipped_in_a_row + self._skip_void()
            if self.skipped_in_a_row >= max(16, SKIPPED_BATCHES * self.schedule.groups_per_step):
                raise ScheduleStuck(
                    f"the last {self.skipped_in_a_row} groups had no valid execution; see why executions end in events.jsonl"
                )
        return []

    def _on_transferred(self, event: TransferDone) -> list[Decision]:
        self._moves.done(event)
        return []

    def _on_transfer_failed(self, event: TransferFailed) -> list[Decision]:
        self._moves.failed(event)
        return []

    def _on_step_done(self, event: StepDone) -> list[Decision]:
        if self.phase is not Phase.CLOSING or event.step != self.step + 1:
            raise ValueError(f"step {event.step} is done, but the phase is {self.phase.value} after step {self.step}")
        self.step += 1
        self._goal -= self.schedule.groups_per_step - len(self._step)  # closed short: no later step makes up for it
        for group in self._step.done():
            self._backlog.consumed.add(group)
        self.phase = Phase.BURST
        return self._publish() if self.step >= self._burst_end else []

    def _on_published(self, event: Published) -> list[Decision]:
        if self.phase is not Phase.PUBLISHING or event.version != self.step:
            raise ValueError(f"version {event.version} is published, but the phase is {self.phase.value} after step {self.step}")
        self.published = event.version
        if self.step >= self.schedule.steps:
            self.phase = Phase.DONE
            return [Finish()]
        return self._begin_burst()

    def _on_claimed(self, event: Claimed) -> list[Decision]:
        if event.step == self.step + 1:
            self._step.claim(event.groups)
        return []

    def _on_capacity(self, event: CapacityChanged) -> list[Decision]:
        self.schedule = self.schedule.holding(event.cell, event.slots)
        return []

    # -- what a mode says -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _may_leave(self, cell: int) -> bool:
        """Whether `cell`, the next in order, may leave rollout now; asked only once training may begin (`_begins`)."""

    @abstractmethod
    def _staying(self) -> int:
        """How many cells stay in training over the boundary at which the policy is (already dispatched)."""

    def _begins(self) -> bool:
        """Whether enough waits for training to begin: with streaming one complete group, else all that the burst needs."""
        return self._backlog.ready_count >= (1 if self.schedule.streaming else self._needed)

    def _room(self) -> int:
        """Groups that may be dispatched in mid-burst while cells are away: no more than those that remain can hold."""
        return groups_that_fit(self.schedule, self.roles, self.waterlevel)

    # -- decisions ----------------------------------------------------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """Groups that the burst has yet to be fed."""
        return (self._burst_end - self.step) * self.schedule.groups_per_step - len(self._step)

    def _begin_burst(self) -> list[Decision]:
        """The boundary: dispatch, and say which cells go back to rollout."""
        self.phase = Phase.BURST
        self.burst += 1
        self._burst_end = min(self.step + self.schedule.mu, self.schedule.steps)
        self._moves.begin_burst()
        self._open = False
        decisions = self._drop_overdue() + self._top_up()
        self._moves.boundary(self._staying())
        return decisions

    def _advance(self) -> list[Decision]:
        if self.phase is not Phase.BURST:
            return []
        self._moves.settle()  # the end of the returns opens the step for feeding
        decisions = self._drop_overdue() + self._replace_skipped()
        self._open = self._open or (not self._moves.returning and self._begins())
        decisions += self._feed()
        return decisions + self._move_or_close()

    def _top_up(self) -> list[Decision]:
        self._goal = boundary_target(self.schedule, self.step)
        return self._dispatch(self._goal - self.outstanding)

    def _dispatch(self, groups: int) -> list[Decision]:
        if groups <= 0:
            return []
        self._asked += groups
        return [Dispatch(groups, self.published)]

    def _replace_skipped(self) -> list[Decision]:
        """Skipped groups leave less outstanding than there should be: ask for what is missing, as far as it fits."""
        missing = max(self._needed, self._goal if self.keeps_spare else 0) - self.outstanding
        if missing > 0 and self._moves.away:  # inside the training part of a burst
            missing = min(missing, self._room())
        return self._dispatch(missing)

    def _skip_void(self) -> int:
        """Drop groups with nothing to train on; how many."""
        void = self._backlog.void()
        for state in void:
            self._backlog.take(state.group)
            self._backlog.consumed.add(state.group)
        self.skipped += len(void)
        return len(void)

    def _drop_overdue(self) -> list[Decision]:
        """Groups that the open step would be too late for: none, but after a resume that gave up steps."""
        bound = self.schedule.staleness_bound
        overdue = self._backlog.overdue(self.step - bound) if bound is not None else []
        for state in overdue:
            self._backlog.take(state.group)
            self._backlog.consumed.add(state.group)
        self.dropped += len(overdue)
        return [Drop(state.group) for state in overdue]

    def _feed(self) -> list[Decision]:
        if not self.roles.core_trains or not self._open:  # `_open` waits for the returns
            return []
        decisions: list[Decision] = []
        while not self._step.full:
            state = self._backlog.oldest()
            if state is None or holds_back(self._backlog, state, self.schedule, self.step, len(self._step)):
                break
            self._backlog.take(state.group)
            self._step.feed(state.group)
            self._goal -= 1
            decisions.append(Feed(state.group))
        return decisions

    def _move_or_close(self) -> list[Decision]:
        if self._moves.moving:
            return []
        if self._moves.returning:
            return self._moves.begin(self.roles.prefix - 1, Role.ROLLOUT)
        if self._joins():
            return self._moves.begin(self.roles.prefix, Role.TRAINING)
        return self._close_if_due() if self.roles.core_trains else []

    def _joins(self) -> bool:
        """Whether the next cell in order leaves rollout now."""
        cell = self.roles.prefix
        if cell >= self.schedule.training_cells or self._moves.refused(cell) or not self._open:
            return False
        if self.schedule.join_late and self.closes_burst and self._step.full and self._step.all_claimed:
            return False
        return self._may_leave(cell)

    def _close_if_due(self) -> list[Decision]:
        starved = self.outstanding == 0
        if self._step.full or (starved and len(self._step)):
            if self.schedule.join_late and not self._step.all_claimed:
                return []
            self.phase = Phase.CLOSING
            return [CloseStep(self.step + 1)]
        if not starved:
            return []
        if self.step > self.published:
            return self._publish()
        return self._begin_burst() + self._advance()

    def _publish(self) -> list[Decision]:
        self.phase = Phase.PUBLISHING
        return [Publish(self.step)]


_HANDLERS: dict[type, Callable[[Policy, Any], list[Decision]]] = {
    GroupDispatched: Policy._on_dispatched,
    ExecutionFinished: Policy._on_finished,
    GroupComplete: Policy._on_complete,
    TransferDone: Policy._on_transferred,
    TransferFailed: Policy._on_transfer_failed,
    Claimed: Policy._on_claimed,
    StepDone: Policy._on_step_done,
    Published: Policy._on_published,
    CapacityChanged: Policy._on_capacity,
}
