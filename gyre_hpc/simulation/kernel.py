"""The discrete-event kernel: one heap of what happens next, the live system's policy, modelled engines and trainers.

Ordering key: (time, sequence number), so a seed gives one result. Invariants: the policy hears what is true in the model and nothing
else, in the order in which it happens; decisions are carried out in the order given; one activity (transfer, close, publication) at a
time, which the policy sees to itself and the kernel checks; an event that was overtaken (an end on an engine that has changed since) is
passed over by its number of changes.

An engine that dies while it serves loses its slots; the policy is told, as live, and again when it is back. Its executions go on elsewhere;
what finds no room waits at the queue's front. A cell that trains has no engine to lose, and returns with a whole one.

An attempt that ends (a node failed, the allocation was taken away) loses the open step and all roles; the policy goes on from the
snapshot of the last step that was closed, with the groups as the ledger has them, as the live controller does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

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
    StepDone,
    Transfer,
    TransferDone,
)
from cells.policies import make_policy
from cells.policy import Phase, Policy
from cells.schedule import ScheduleStuck
from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.fleet import Execution, Fleet
from gyre_hpc.simulation.outcome import Outcome, Recorder
from gyre_hpc.simulation.scenario import Scenario, most_served
from gyre_hpc.simulation.trainer import Trainer

_END, _DEADLINE, _CLAIMED, _ACTIVITY, _FAULT, _RESUME, _DEATH, _BACK = range(8)
LONGEST = 10 * 365 * 24 * 3600.0
"""A run that takes ten years is stuck in faults: nothing gets done between two of them."""
MOST_ATTEMPTS = 200
"""The same of attempts in a row without a step."""


@dataclass
class Group:
    """A group as the ledger would tell it."""

    version: int
    size: int
    finished: int = 0
    valid: int = 0
    complete: bool = False
    longest: float = 0.0
    """Seconds of its slowest execution so far."""


def simulate(scenario: Scenario, seed: int = 0, record: bool = False) -> Outcome:
    """Run to the end. `record` keeps what every cell did, for a picture. Raises GyreError for a run that would never end."""
    try:
        return Simulation(scenario, seed, record).run()
    except ScheduleStuck as stuck:
        raise GyreError(f"the simulated run gets nowhere: {stuck}", "a workload with more groups that may be trained on") from None


class Simulation:
    """One run of one scenario under one seed."""

    def __init__(self, scenario: Scenario, seed: int, record: bool) -> None:
        self.scenario, self.seed = scenario, seed
        schedule = scenario.schedule
        self.policy: Policy = make_policy(schedule)
        nodes = (*scenario.nodes, scenario.standalone_nodes)
        shared = scenario.at_once is not None and scenario.at_once > most_served(schedule)
        slots = (*schedule.capacity, schedule.standalone_capacity)
        self.fleet = Fleet(slots, scenario.beta, nodes, scenario.at_once, shared)
        self.trainer = Trainer()
        self.recorder = Recorder(scenario, record)
        self.now = 0.0
        self.groups: dict[int, Group] = {}
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._sequence = 0
        self._numbers = 0
        self._next_group = 0
        self._decisions: deque[Decision] = deque()
        self._saved = self.policy.snapshot()
        self._saving = self._saved
        self._fed_versions: list[int] = []
        self._attempt = self._productive = 0
        self._busy = False
        self._draining: int | None = None
        """The step that closes once what is fed is computed."""
        self._limits = scenario.workload.limits
        self._budget = self._limits.first
        self._faults = random.Random(seed * 7919 + 1)
        self._deaths = random.Random(seed * 7919 + 2)
        self._dead = False
        """Between two attempts: nothing of ours runs."""
        self._finished = False

    def run(self) -> Outcome:
        self._plan_fault()
        self._plan_death()
        self._decisions.extend(self.policy.start())
        self._settle()
        while not self._finished:
            if not self._heap:
                raise GyreError(f"the simulated run stands still: {self.policy.phase.value}, step {self.policy.step}", "report this")
            self.now, _, kind, what, changes = heapq.heappop(self._heap)
            if self.now > LONGEST:
                raise GyreError("the simulated run takes more than ten years", "fewer faults, or executions that survive them")
            self._happen(kind, what, changes)
            self._settle()
        self.trainer.advance(self.now)
        return self.recorder.result(self.now, self.trainer.done, self.fleet, self.policy)

    # -- what happens -----------------------------------------------------------------------------------------------------------

    def _happen(self, kind: int, what: Any, changes: int) -> None:
        if kind == _END:
            if changes == self.fleet.engines[what].changes and not self._dead:
                self._ends_on(what)
        elif kind == _DEADLINE:
            if what.deadline == self.now and not self._dead:  # also while it waits for a slot that died
                self.recorder.cut += 1
                self._over(what, self._limits.valid)
        elif kind == _CLAIMED:
            if changes == self.trainer.changes:
                self._all_computed()
        elif kind == _ACTIVITY:
            if changes == self._attempt:
                self._busy = False
                self._complete_activity(what)
        elif kind == _FAULT:
            if changes == self._attempt:
                self._fail()
        elif kind == _RESUME:
            self._resume(what)
        elif changes == self._attempt:
            self._die() if kind == _DEATH else self._come_back(*what)

    def _ends_on(self, index: int) -> None:
        found = self.fleet.next_end(index)
        if found is not None:
            self._over(found[1], True)

    def _over(self, execution: Execution, valid: bool) -> None:
        self.recorder.rolled(self.now, self.fleet)
        follower = self.fleet.remove(execution, self.now)
        if follower is not None:
            self._started(follower)
        execution.deadline = -1.0
        number = execution.group
        group = self.groups[number]
        group.finished += 1
        group.valid += valid
        seconds = self.now - execution.began
        group.longest = max(group.longest, seconds)
        self.recorder.execution(seconds)
        self._tell(ExecutionFinished(number))
        if group.finished == group.size:
            group.complete = True
            if self.scenario.workload.skipped(self.seed, number):
                group.valid = 0
            self.recorder.query(group.longest)
            self._tell(GroupComplete(number, group.valid))

    def _all_computed(self) -> None:
        self.trainer.advance(self.now)
        if self._draining is not None:
            self._after(self.scenario.costs.close + self._ragged(), StepDone(self._draining))
            self._draining = None
        elif self.scenario.schedule.join_late:
            self._tell(Claimed(self.policy.step + 1, self.policy.fed))

    def _ragged(self) -> float:
        """How much longer n cells that begin together take for whole micro-steps than for a fluid: on average (n - 1) / 2n of one."""
        cells = self.policy.roles.prefix
        return self.scenario.costs.grain * (cells - 1) / (2 * cells)

    def _complete_activity(self, event: Event) -> None:
        self.recorder.rolled(self.now, self.fleet)
        match event:
            case TransferDone(cell, to):
                if to is Role.TRAINING:
                    self.trainer.set_nodes(self.trainer.nodes + self.scenario.nodes[cell], self.now)
                    self._announce_claims()
                else:
                    self._make_whole(cell)
                    for execution in self.fleet.open(cell, self.now):
                        self._started(execution)
                self.recorder.role(cell, to.value, self.now)
            case StepDone(step):
                self._saved = self._saving
                self._productive = self._attempt
                self.recorder.step(step, self.now, self._fed_versions)
                self._fed_versions = []
                for group in self.policy.current:
                    del self.groups[group]
            case Published(version):
                self._finished = self._beyond_window(version)
        if self._finished:
            return
        self._tell(event)
        if isinstance(event, StepDone) and self.policy.phase is not Phase.PUBLISHING:  # after a fault bursts end elsewhere
            self._finished = self._beyond_window(event.step)

    def _beyond_window(self, version: int) -> bool:
        return self.scenario.window is not None and version >= self.scenario.window

    # -- faults -----------------------------------------------------------------------------------------------------------------

    def _plan_fault(self) -> None:
        faults = self.scenario.faults
        times = []
        if faults.node_mtbf > 0:
            times.append(self._faults.expovariate(self.scenario.all_nodes / faults.node_mtbf))
        if faults.preempt_every > 0:
            times.append(faults.preempt_every)
        if times:
            self._push(self.now + min(times), _FAULT, None, self._attempt)

    def _plan_death(self) -> None:
        mtbf = self.scenario.faults.engine_mtbf
        if mtbf > 0:
            self._push(self.now + self._deaths.expovariate(self.scenario.all_nodes / mtbf), _DEATH, None, self._attempt)

    def _die(self) -> None:
        """The engines of one node, drawn among all; nothing where that node trains, or what it was part of is dead already."""
        scenario, costs = self.scenario, self.scenario.costs
        self._plan_death()
        nodes = (*scenario.nodes, scenario.standalone_nodes)
        index = self._deaths.choices(range(len(nodes)), nodes)[0]
        engine = self.fleet.engines[index]
        if not engine.open or not engine.room:
            return
        gone = engine.room if index < len(scenario.nodes) else min(engine.room, max(1, engine.whole // nodes[index]))
        self.recorder.rolled(self.now, self.fleet)
        self.recorder.deaths += 1
        moving = max(0, len(engine.running) - (engine.room - gone))
        wait = costs.hand_over + costs.kv.again(moving, nodes[index])
        self.recorder.moved_seconds += moving * wait
        self.fleet.hold(index, engine.room - gone, self.now, wait)
        self._tell_capacity(index)
        self._push(self.now + scenario.faults.engine_start, _BACK, (index, gone), self._attempt)

    def _come_back(self, index: int, slots: int) -> None:
        """Engines of `slots` executions; a cell that has been in training meanwhile is whole already."""
        engine = self.fleet.engines[index]
        self.recorder.rolled(self.now, self.fleet)
        for execution in self.fleet.hold(index, min(engine.whole, engine.room + slots), self.now):
            self._started(execution)
        self._tell_capacity(index)

    def _make_whole(self, cell: int) -> None:
        """A return starts what is missing."""
        engine = self.fleet.engines[cell]
        if engine.room < engine.whole:
            engine.room = engine.whole
            self._tell_capacity(cell)

    def _tell_capacity(self, index: int) -> None:
        engine = self.fleet.engines[index]
        cell = index if index < len(self.scenario.nodes) else None
        self._tell(CapacityChanged(cell, min(engine.room, engine.slots)))

    def _fail(self) -> None:
        """The attempt ends: roles and the open step are gone; engines stand until the next attempt."""
        self._attempt += 1
        if self._attempt - self._productive > MOST_ATTEMPTS:
            what = f"{MOST_ATTEMPTS} attempts in a row end before step {self.policy.step + 1} is done"
            raise GyreError(f"the simulated run gets nowhere: {what}", "fewer faults, or executions that survive them")
        self._busy = False
        self._draining = None
        self._decisions.clear()
        self.trainer.drop(self.now)
        self.recorder.fault(self.now, self.fleet)
        self._fed_versions = []
        self._dead = True
        for engine in self.fleet.engines:
            engine.changes += 1
        self._push(self.now + self.scenario.faults.restart, _RESUME, self.now, 0)

    def _resume(self, failed: float) -> None:
        restart = self.now - failed
        self.fleet.pause(failed, self.now)
        self._dead = False
        if self.scenario.faults.executions_survive:
            for execution in self.fleet.begun():
                self._set_deadline(execution, execution.deadline + restart)
        else:
            self.fleet.restart(self.now)
        for index, engine in enumerate(self.fleet.engines):
            engine.room = engine.whole
            for execution in self.fleet.open(index, self.now):
                self._started(execution)
        self.recorder.resume(self.now)
        self.policy = make_policy(self.scenario.schedule, self._saved)
        frontier = [GroupFrontier(n, g.version, g.size, g.finished, g.valid if g.complete else None) for n, g in self.groups.items()]
        self._finished = self._beyond_window(self.policy.published)
        if not self._finished:
            self._plan_fault()
            self._plan_death()
            self._decisions.extend(self.policy.resume(frontier))

    # -- what the policy decides ------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self._decisions.extend(self.policy.on(event))

    def _settle(self) -> None:
        """Carry decisions out until there are none, then say when the engines that changed have their next end."""
        while self._decisions:
            self._carry_out(self._decisions.popleft())
        for index in self.fleet.dirty:
            found = self.fleet.next_end(index)
            if found is not None:
                self._push(found[0], _END, index, self.fleet.engines[index].changes)
        self.fleet.dirty.clear()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Dispatch(groups, version):
                for _ in range(groups):
                    self._dispatch(version)
            case Transfer():
                self._transfer(decision)
            case Feed(group):
                self._fed_versions.append(self.groups[group].version)
                self.trainer.feed(self._training_of(group), self.now)
                self._announce_claims()
            case Drop(group):  # every step is saved here: no attempt gives up one, and what was dispatched stays within the bound
                raise AssertionError(f"group {group} is too old for the bound, though no step was given up")
            case CloseStep(step):
                self._saving = self.policy.snapshot()
                self._draining = step
                self._announce_claims()
            case Publish(version):
                self._after(self.scenario.costs.publish, Published(version))
            case Finish():
                self._finished = True

    def _training_of(self, group: int) -> float:
        known = self.scenario.train_groups
        return known[group] if group < len(known) else self.scenario.train_group

    def _dispatch(self, version: int) -> None:
        number, size = self._next_group, self.scenario.schedule.group_size
        self._next_group += 1
        self.groups[number] = Group(version, size)
        self.recorder.rolled(self.now, self.fleet)
        self.recorder.dispatch(self.now)
        for work in self.scenario.workload.group(self.seed, number, size):
            execution = Execution(self._numbers, number, work)
            self._numbers += 1
            if self.fleet.add(execution, self.now):
                self._started(execution)
        self._tell(GroupDispatched(number, version, size))

    def _transfer(self, decision: Transfer) -> None:
        cell, costs = decision.cell, self.scenario.costs
        self.recorder.rolled(self.now, self.fleet)
        self.recorder.transfers += 1
        if decision.to is Role.TRAINING:
            moving, nodes = len(self.fleet.engines[cell].running), self.scenario.nodes[cell]
            wait = costs.hand_over + costs.kv.wait(moving, nodes)
            self.fleet.close(cell, self.now, wait)
            self.recorder.moved_bytes += costs.kv.moved_bytes(moving)
            self.recorder.moved_seconds += moving * wait
            self.recorder.role(cell, "transfer", self.now)
            self._after(costs.to_training + costs.kv.longer(moving, nodes), TransferDone(cell, decision.to))
        else:
            self.trainer.set_nodes(self.trainer.nodes - self.scenario.nodes[cell], self.now)
            self.recorder.role(cell, "transfer", self.now)
            self._after(costs.to_rollout, TransferDone(cell, decision.to))
        self._announce_claims()

    def _announce_claims(self) -> None:
        """When the trainers will have nothing left, as it looks now."""
        if self._draining is None and not self.policy.fed:
            return
        at = self.trainer.empty_at()
        if at is not None:
            self._push(max(at, self.now), _CLAIMED, None, self.trainer.changes)

    def _started(self, execution: Execution) -> None:
        """It has a slot: its budget begins the first time."""
        if execution.deadline < 0 and self._budget < math.inf:
            self._set_deadline(execution, self.now + self._budget)

    def _set_deadline(self, execution: Execution, at: float) -> None:
        execution.deadline = at
        if self._budget < math.inf:
            self._push(at, _DEADLINE, execution, 0)

    # -- the heap ---------------------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, event: Event) -> None:
        """An activity that answers with `event`."""
        if self._busy:
            raise AssertionError(f"two activities at once: {event}")
        self._busy = True
        self._push(self.now + seconds, _ACTIVITY, event, self._attempt)

    def _push(self, at: float, kind: int, what: Any, changes: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, what, changes))
