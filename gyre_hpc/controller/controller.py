"""Rank 0: carries out what the scheduling policy decides. Hosts no model.

Ordering key: decisions are carried out in the order in which the policy gave them; one *activity* (transfer, close, publication) at a
time, written as a generator that yields while it waits, so that feeding work, the ledger's changes, the live file and the stop file
go on meanwhile. Invariants: every wait of an activity has a name and a deadline; nothing is told to the policy before it is true
everywhere (all leaders acknowledged, routes moved, checkpoint durable); `step.end` is emitted after the step's checkpoint, and after a
crash in between the next attempt emits it from the checkpoint, so no step is skipped or repeated in the log.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cells.epochs import Channel
from cells.events import (
    CapacityChanged,
    CloseStep,
    Decision,
    Dispatch,
    Drop,
    Event,
    Feed,
    Finish,
    GroupComplete,
    Mode,
    Publish,
    Published,
    StepDone,
    Transfer,
)
from cells.lines import Lines
from cells.policies import make_policy
from cells.roles import CellState
from cells.waiting import wait
from gyre_hpc.branches import Branch, Branches
from gyre_hpc.checkpoint import Checkpoint, read_state
from gyre_hpc.config import Config
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.changes import Changes
from gyre_hpc.controller.dispatching import Dispatching
from gyre_hpc.controller.engines import Engines
from gyre_hpc.controller.feeding import Feeding
from gyre_hpc.controller.groups import Groups
from gyre_hpc.controller.messages import Close, Start, Stop
from gyre_hpc.controller.plan import Planner
from gyre_hpc.controller.publication import Publisher, hold_calls, open_routes
from gyre_hpc.controller.restoring import patience
from gyre_hpc.controller.resuming import branch_off, reconcile
from gyre_hpc.controller.revival import Revival
from gyre_hpc.controller.schedule import schedule_of
from gyre_hpc.controller.showing import Showing
from gyre_hpc.controller.stepend import closing, trained
from gyre_hpc.controller.stepwork import Counter, StepWork
from gyre_hpc.controller.stopping import Newest, Saves, beside, for_a_while, save_at_stop
from gyre_hpc.controller.transfers import Order, Transfers, tell
from gyre_hpc.errors import ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths
from gyre_hpc.stopfile import StopFile
from gyre_hpc.tasks.source import TaskSource
from trees.store import StoreReader

logger = logging.getLogger(__name__)
T = TypeVar("T")
Activity = Generator[None, None, list[Event]]
_POLL, _SOON = 0.01, 0.002
"""Seconds between two looks: when nothing is under way, and while an activity is."""
_LOOK = 0.05
"""Seconds between two looks for the stop file, on a file system that others use as well."""


class Controller:
    """One attempt of a run. `run` returns the exit code; anything wrong is a GyreError."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        attempt: int,
        base_model: Path,
        channel: Channel,
        lines: Lines,
        client: ControlClient,
        tasks: TaskSource,
        checkpoint: Checkpoint | None,
        counter: Counter,
    ) -> None:
        self.config, self.paths, self.attempt = config, paths, attempt
        self.channel, self.client = channel, client
        self.saved = read_state(checkpoint) if checkpoint else None
        self._start_patience = patience(config, checkpoint)
        self.policy = make_policy(schedule_of(config), self.saved.policy["schedule"] if self.saved else None)
        self.events = EventLog(paths.events)
        self.groups = Groups()
        self._dispatching = Dispatching(self.groups, tasks, client, self.events, config.schedule.group_size)
        training = config.training
        planner = Planner(StoreReader(paths.trees), training.jmax, config.run.seed, training.tokens_per_microstep)
        self._feeding = Feeding(planner, StepWork(counter), channel, config.schedule.shuffle)
        self.branches = Branches()
        self._engines = Engines(())
        """As they were at the start."""
        self._standalone = range(0)
        """Cells behind the others, which only serve."""
        self._decisions: deque[Decision] = deque()
        self._activity: Activity | None = None
        self._activity_name = ""
        self._closing = False
        """Whether the activity is a step's close: the cells can't be got out of it."""
        self._given_up = False
        self._writing = 0.0
        """Seconds that the checkpoint of the step that is being closed may take on top of the rest."""
        self._step_started = time.monotonic()
        self._progress_at = time.monotonic()
        self._changes = Changes(client)
        self._changes_after = 0
        self._finished = False
        self._stopping = False
        self.asking = Asking(channel, lines)
        self._publisher = Publisher(self.asking, client, config, paths, base_model)
        self.transfers = Transfers(self.asking, client, self.events, config.deadlines)
        self.revival = Revival(self.asking, client, self.events, config.deadlines, attempt)
        self._showing = Showing(config, attempt, paths.live, client.status, self.asking.http)
        self._stop_file = StopFile(paths.runtime(attempt))
        self._look_at = 0.0
        self._saves = Saves(self.saved.step if self.saved else 0, read_events(paths.events))
        self._told: dict[str, Any] = {}
        """What the last step's end told, for a checkpoint of it."""

    # -- the loop -----------------------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Runs until all steps are done (DONE) or the stop file appears (RESUMABLE)."""
        self._drain(self._start(), stoppable=True)
        self._changes.follow(self._changes_after)
        while not self._finished:
            busy = self._take_changes()
            self._take_claims()
            self._take_notes()
            ended = self._advance_activity()
            busy |= ended
            if self._stop_asked(ended):
                self._stopping = True
                break
            busy |= not self._given_up and self._carry_out()
            self._showing.show(self.policy, len(self._standalone), self._activity_name)
            self._check_idle()
            if not busy:
                time.sleep(_POLL if self._activity is None else _SOON)
        if self._stopping:
            self._drain(self._save_beside())
        # the driver waits for all of deadlines.stop, and the ranks want some of it
        patience = min(self.config.deadlines.transfer, self.config.deadlines.stop / 2, max(0.1, self._stop_file.left() / 2))
        self._drain(hold_calls(self.asking, self.client, self._serving(), patience))
        reason = "stopped" if self._stopping else "done"
        self._drain(self.asking.agree(Stop(reason), "stop", self.config.deadlines.step))
        self._showing.last(self.policy, len(self._standalone), self._activity_name)
        self.channel.close()
        for drain, name in ((self.channel.drain, "the end of the channel"), (self.asking.lines.drain, "the end of the lines")):
            wait(drain, name, self.config.deadlines.step, logger.warning)
        return ExitCode.RESUMABLE if self._stopping else ExitCode.DONE

    def _stop_asked(self, at_once: bool) -> bool:
        """The file is looked for now and then, and before the next activity begins: on a busy run one follows the other at once."""
        now = time.monotonic()
        if not at_once and now < self._look_at:
            return False
        self._look_at = now + _LOOK
        return self._stop_file.asked()

    def _save_beside(self) -> Generator[None, None, None]:
        """The newest step, while what is in hand is ended. A close that is decided and not begun, or not over in time, is no step."""
        left, name = self._stop_file.left, self._activity_name
        activity = self._told_to_policy(self._activity) if self._activity else None
        if activity is not None and self._closing:
            reserve = self._saves.needs(self.policy.step, left())
            logger.info("stop: %s is closed first, until %.1f s are left", name, reserve)
            activity = yield from for_a_while(activity, name, lambda: left() > reserve)
        busy = name if activity is not None else "its present micro-step" if self._state_of(0) is CellState.TRAINING else ""
        while True:
            newest = Newest(self.policy.step, self._told, self._state(self.policy.snapshot(given_up=True)))
            save = save_at_stop(self.asking, self.events, self._saves, newest, left(), busy)
            settled = yield from beside(save, activity, name, left)
            if settled or self.policy.step == newest.step:
                return
            activity = None

    def _told_to_policy(self, activity: Activity) -> Generator[None, None, None]:
        """To its end: where the cells are decides whose routes are closed. Nothing new begins."""
        for event in (yield from activity):
            self.policy.on(event)

    def _drain(self, activity: Generator[None, None, T], stoppable: bool = False) -> T:
        """Run one generator to its end; `stoppable`: a stop that is asked for meanwhile need not wait for it."""
        while True:
            if stoppable and self._stop_file.asked():
                raise Resumable("stopped while the cells were starting", "the same command resumes")
            try:
                next(activity)
            except StopIteration as stop:
                value: T = stop.value
                return value
            time.sleep(_SOON)

    def _advance_activity(self) -> bool:
        if self._activity is None:
            return False
        try:
            next(self._activity)
            return False
        except StopIteration as stop:
            self._activity, self._activity_name = None, ""
            self._progress_at = time.monotonic()
            for event in stop.value:
                self._decisions.extend(self.policy.on(event))
            return True
        except GyreError as error:
            if self._closing or not self._stop_file.soon():
                raise
            logger.warning("%s is given up, the attempt is to stop: %s", self._activity_name, error.line)
            self._activity, self._activity_name, self._given_up = None, "", True
            return True

    def _carry_out(self) -> bool:
        """Decisions in order. Those that take time become the activity; the next such one waits behind it."""
        busy = self._begin_revival()
        while self._decisions:
            decision = self._decisions[0]
            blocking = isinstance(decision, Transfer | CloseStep | Publish | Finish)
            if blocking and self._activity is not None:
                break
            self._decisions.popleft()
            busy = True
            match decision:
                case Dispatch():
                    for group in self._dispatching.dispatch(decision, self.policy.burst):
                        self._decisions.extend(self.policy.on(group))
                case Feed():
                    self._feeding.feed([decision.group, *self._fed_with_it()], self.groups, self.policy.step + 1)
                case Drop():
                    self._dispatching.drop(decision.group, self.policy.step)
                case Transfer():
                    self._begin(self._transfer(decision), f"transfer of cell {decision.cell} to {decision.to.value}")
                case CloseStep():
                    self._begin(self._close(decision.step), f"step {decision.step}", closing=True)
                case Publish():
                    self._begin(self._publish(decision.version), f"publication of version {decision.version}")
                case Finish():
                    self._finished = True
        return busy

    def _begin(self, activity: Activity, name: str, closing: bool = False) -> None:
        self._activity, self._activity_name, self._closing = activity, name, closing

    # -- waiting ------------------------------------------------------------------------------------------------------------------

    def _take_changes(self) -> bool:
        busy = False
        for change in self._changes.take():
            busy = True
            self._progress_at = time.monotonic()
            if change["kind"] == "ended" and change["valid"]:
                self._showing.scored(change["score"])
            for event in self.groups.on_change(change):
                self._decisions.extend(self.policy.on(event))
                if isinstance(event, GroupComplete) and not event.valid:
                    self._dispatching.release(event.group)  # the policy skips it
        return busy

    def _take_claims(self) -> None:
        """With `schedule.join_late` the open step is closed once its work is claimed."""
        if not self.policy.schedule.join_late or self._activity is not None:
            return
        claimed, moved = self._feeding.look(self.policy.step + 1)
        if moved:
            self._progress_at = time.monotonic()
        if claimed is not None:
            self._decisions.extend(self.policy.on(claimed))

    def _take_notes(self) -> None:
        """Engines that died, and how long the core may be at its checkpoint."""
        while (found := self.asking.lines.note()) is not None:
            cell = found[0] - 1
            if "writing" in found[1]:
                self._writing = found[1]["writing"]
                continue
            self.revival.hear(cell, found[1]["died"])
            self._decisions.extend(self.policy.on(self._capacity_of(cell)))

    def _begin_revival(self) -> bool:
        """An engine that died in rollout is started again before the next decision that takes time, but for those that need it no more, or
        start it themselves: the end, and a publication."""
        if self._activity is not None or any(isinstance(decision, Finish | Publish) for decision in self._decisions):
            return False
        before = self.revival.cells
        cell = self.revival.due(self._state_of)
        for forgotten in before - self.revival.cells:  # in training: its return starts what is missing
            self._decisions.extend(self.policy.on(self._capacity_of(forgotten)))
        if cell is None:
            return False
        self._begin(self._revive(cell), f"start of an engine of cell {cell}")
        return True

    def _revive(self, cell: int) -> Activity:
        yield from self.revival.run(cell, self.policy.published, str(self._publisher.weights))
        return [self._capacity_of(cell)]

    def _capacity_of(self, cell: int) -> CapacityChanged:
        return self._engines.changed(cell, self.revival.dead, self.config.cells.count)

    def _state_of(self, cell: int) -> CellState:
        return CellState.ROLLOUT if cell in self._standalone else self.policy.roles.state(cell)

    def _check_idle(self) -> None:
        idle = time.monotonic() - self._progress_at
        if self._activity is None and idle > self.config.deadlines.idle:
            raise Resumable(
                f"nothing has ended for {idle:.0f} s (deadlines.idle): {self.policy.waterlevel} executions are unfinished",
                "see the supervisors' logs; the same command resumes",
            )

    # -- activities ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> Generator[None, None, None]:
        """Engines up, checkpoint restored, its weights on every engine, routes open, the ledger read: a burst's boundary."""
        step = self.saved.step if self.saved else 0
        if self.attempt > 1:
            self.events.emit("resume", attempt=self.attempt, step=step)
        reports = yield from self.asking.agree(Start(step), "start of the cells", self._start_patience)
        if self.saved:
            reconcile(self.saved, self.paths, self.events)
        engines = self._engines = Engines(reports)
        self.events.emit("engines", attempt=self.attempt, **engines.facts(self.config))
        self._standalone = range(self.config.cells.count, len(reports))
        self.policy = make_policy(schedule_of(self.config, engines.capacities), self.saved.policy["schedule"] if self.saved else None)
        for cell, engine, address in engines.addresses():
            yield from self.asking.call(partial(self.client.set_route, cell, address, engine))
        if step:
            yield from self._export_and_update(step)
        else:
            yield from open_routes(self.asking, self.client, range(len(reports)))
        schedule: dict[str, Any] = self.saved.policy["schedule"] if self.saved else {"consumed_below": 0, "consumed": []}
        first = schedule["consumed_below"]
        ledger = yield from self.asking.call(lambda: self.client.ledger(first))
        # a group's own place among the branches needs the first group of now: above all that the ledger has
        following = 1 + max((int(entry["group"]) for entry in ledger["groups"]), default=first - 1)
        if self.attempt > 1:
            here = Branch(step, following, int(ledger["first_execution"]))
            self.branches = self._feeding.planner.branches = branch_off(self.saved, here, first, self.paths, self.events)
        frontier = self.groups.restore(ledger, first, self.branches)
        self._changes_after = int(ledger["next"])
        logger.info("attempt %d begins at step %d with %d groups in the ledger", self.attempt, step, len(frontier))
        self._decisions.extend(self.policy.resume(frontier))
        for group in frontier:
            if group.valid == 0 or group.group in schedule["consumed"]:
                self._dispatching.release(group.group)
        self._step_started = self._progress_at = time.monotonic()

    def _transfer(self, decision: Transfer) -> Activity:
        status = yield from self.asking.call(self.client.status)
        may_hold = self.policy.schedule.mode is Mode.ASYNC
        order = Order(decision.cell, decision.to, may_hold, self.policy.published, str(self._publisher.weights))
        ended = yield from self.transfers.run(order)
        return [tell(self.events, order, ended, int(status.get("live", 0)))]

    def _close(self, step: int) -> Activity:
        plans, items = self._feeding.close()
        fields = trained(step, plans, self.groups, self.policy.roles.prefix, self.attempt)
        message = Close(
            step=step,
            items=items,
            prefix=self.policy.roles.prefix,
            executions=fields["executions"],
            refresh=self.policy.keeps_satellites or not self.policy.closes_burst,
            checkpoint=step % self.config.checkpoint.every == 0 or step == self.config.run.steps,
            fields=fields,
            state=self._state(self.policy.snapshot()),
        )
        self._writing = 0.0
        reports = yield from self.asking.agree(message, f"step {step}", lambda: self.config.deadlines.step + self._writing)
        if any(report.get("given_up") for report in reports):
            raise Resumable(f"step {step} is given up", "the same command resumes")
        self._feeding.closed()
        core = reports[0]
        self._told = core["fields"]
        seconds = time.monotonic() - self._step_started
        self._step_started = time.monotonic()
        fields = {**core["fields"], "close_seconds": closing(reports[: message.prefix]), "seconds": round(seconds, 3)}
        if core.get("checkpoint"):
            self._saves.took(step, core["checkpoint"]["seconds"])
            self.events.emit("checkpoint", step=step, **core["checkpoint"])
        self.events.emit("step.end", **fields)
        logger.info("step %d: score %.3f, loss %.4f, %.1f s", step, fields["score_mean"], fields["loss"], seconds)
        for group, _ in plans:
            self._dispatching.release(group)
        return [StepDone(step)]

    def _state(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of this process."""
        return {"schedule": snapshot, "branches": self.branches.saved()}

    def _publish(self, version: int) -> Activity:
        began = time.monotonic()
        phases = yield from self._export_and_update(version)
        self.events.emit("publish", version=version, seconds=round(time.monotonic() - began, 4), phases=phases)
        return [Published(version)]

    def _serving(self) -> tuple[int, ...]:
        """Cells whose routes may be open."""
        rollout = (cell for cell, state in enumerate(self.policy.roles.states) if state is CellState.ROLLOUT)
        return (*rollout, *self._standalone)

    def _export_and_update(self, version: int) -> Generator[None, None, dict[str, float]]:
        """The core's weights into every engine that serves; old versions go."""
        serving = self._serving()
        return (yield from self._publisher.publish(version, serving, self._engines.serving(serving, self.revival.dead)))

    # -- at once ------------------------------------------------------------------------------------------------------------------

    def _fed_with_it(self) -> list[int]:
        """With `schedule.shuffle` the groups that the policy feeds at the same time: the step's, for they were all complete before."""
        groups = []
        while self.config.schedule.shuffle and self._decisions and isinstance(following := self._decisions[0], Feed):
            self._decisions.popleft()
            groups.append(following.group)
        return groups
