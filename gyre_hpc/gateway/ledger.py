"""Groups and executions: what was dispatched, who runs what, what is over. The store is its memory; this is the view of it that decides.

A place of a group (places.py) is filled by one execution after the other until one has ended. An attempt that is *lost* is not the
harness's fault and is tried again.

Invariants:
- every state follows from the store's records: Group, Execution (handed out), ExecutionEnd. A lost attempt has an ExecutionEnd whose
  reason begins with "lost:", which leaves its index open. After a crash the attempts without an end are lost, at no cost;
- an index ends once, a group completes once; a repeated dispatch, end or loss changes nothing;
- a harness's secret lets in while its execution lives (admission.py);
- nothing is told (answers, changes, events) before it is durable: callers do `mark = changes.mark()`, commit, `changes.publish(mark)`;
- oldest group first, lowest index first.
Each kind of loss has a budget of its own, `retries` further tries an index; when it is spent the index ends as invalid. The losses in
FREE cost nothing: they are of our own making. Where executions outlive the gateway (gateway/standalone.py), `recover` keeps them, and
`token_of` gives the same token for the same execution again. Not thread-safe: one event loop calls it.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from gyre_hpc.gateway.admission import Admission
from gyre_hpc.gateway.changes import ChangeLog
from gyre_hpc.gateway.places import FREE, LOST, NO_CALLS, RESTART, GroupState, Live, Place, end_event, identity
from trees.records import Execution, ExecutionEnd, Group, Record


class Conflict(Exception):
    """A request that contradicts what the ledger holds."""


class Store(Protocol):
    """What the ledger needs of trees.store.StoreWriter."""

    def allocate_execution(self) -> int: ...
    def append(self, record: Record) -> None: ...


class Records(Protocol):
    """What recovery needs of trees.store.StoreReader; values come in ascending order of their ids."""

    def groups(self) -> Mapping[int, Group]: ...
    def executions(self) -> Mapping[int, Execution]: ...
    def ends(self) -> Mapping[int, ExecutionEnd]: ...


class Ledger:
    """`emit(kind, fields)` takes the run's events; `retries`: further tries for each kind of loss; `seed` of the run."""

    def __init__(
        self,
        store: Store,
        emit: Callable[[str, dict[str, Any]], None],
        retries: int = 2,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        token_of: Callable[[int], str] = lambda execution: secrets.token_urlsafe(24),
    ) -> None:
        self._store, self._retries, self._seed, self._clock = store, retries, seed, clock
        self._admission = Admission(token_of)
        self.changes = ChangeLog(emit)
        self._groups: dict[int, GroupState] = {}
        self.next_group = 0
        """The first group id above all that were dispatched."""
        self.first_execution = 0
        """The first execution id above all that earlier gateways handed out."""
        self._live: dict[int, Live] = {}
        self._handed: dict[str, set[int]] = {}
        """By node: live executions that its supervisor has not named since they were handed out; the answer may not have arrived."""
        self._queue: list[tuple[int, int]] = []
        self._finished = 0
        self._lost = 0
        self._over: set[int] = set()
        """Executions that have an end, lost ones included."""

    # -- recovery -----------------------------------------------------------------------------------------------------------------

    def recover(self, records: Records, told: Iterable[int], *, keep: bool = False) -> list[int]:
        """Take over what an earlier gateway left; returns the executions that it had live: they are lost and tried again, or kept (`keep`).

        `told`: executions whose end is in the run's event log already; the ends of others are told now. Commit and publish afterwards.
        """
        for group in records.groups().values():
            self._add(group)
        ends, known = records.ends(), set(told)
        live = []
        for record in records.executions().values():
            self.first_execution = max(self.first_execution, record.execution + 1)
            place = self._groups[record.group].places[record.index]
            place.attempts = max(place.attempts, record.attempt + 1)
            end = ends.get(record.execution)
            if end is not None:
                self._over.add(record.execution)
            if end is None:
                place.live = record.execution
                self._live[record.execution] = Live(record, "", self._clock())
                if keep:
                    self._admission.admit(record.execution)
                live.append(record.execution)
            elif end.reason.startswith(LOST):
                place.losses[end.reason.removeprefix(LOST)] += 1
                self._lost += 1
            else:
                place.end = end
                self._finished += 1
                if end.execution not in known:
                    self.changes.stage(None, ("execution.end", end_event(record, end)))
        for number, state in self._groups.items():
            for index, place in enumerate(state.places):
                if place.end is None and place.live is None:
                    heapq.heappush(self._queue, (number, index))
        for execution in () if keep else live:
            self.lost(execution, RESTART, "the gateway was restarted")
        return live

    # -- the controller -----------------------------------------------------------------------------------------------------------

    def dispatch(self, groups: Iterable[Group]) -> None:
        """New groups. Known ones are left as they are; Conflict (and nothing happens) if one differs from what is known by its id."""
        new = []
        for group in groups:
            known = self._groups.get(group.group)
            if known is None:
                new.append(group)
            elif known.record != group:
                raise Conflict(f"group {group.group} was dispatched as {known.record}")
        for group in new:
            self._store.append(group)
            self._add(group)
            for index in range(group.size):
                heapq.heappush(self._queue, (group.group, index))
            self.changes.stage({"kind": "dispatched", "group": group.group, "size": group.size, "version": group.version})

    def frontier(self, first: int = 0) -> dict[str, Any]:
        """All groups with id >= `first`: what is over, and how; `next`: the changes after which come on top of this; `first_execution`."""
        groups = [state.entry() for group, state in sorted(self._groups.items()) if group >= first]
        return {"groups": groups, "next": self.changes.last, "first_execution": self.first_execution}

    def group(self, number: int) -> Group | None:
        """The group of this number, if it was dispatched."""
        known = self._groups.get(number)
        return known.record if known is not None else None

    def age(self, execution: int) -> float:
        """Seconds since a live execution was handed out, or since the gateway took it over; 0 for any other."""
        live = self._live.get(execution)
        return self._clock() - live.started if live is not None else 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every execution that lives or has ended, group by group; a lost one is replaced by its successor."""
        for state in self._groups.values():
            yield from state.rows(self._live, self._clock())

    def counts(self) -> dict[str, int]:
        """Executions by state. `lost` counts attempts, the given-up ones excluded."""
        return {
            "queued": len(self._queue),
            "live": len(self._live),
            "finished": self._finished,
            "lost": self._lost,
            "groups": len(self._groups),
        }

    # -- supervisors --------------------------------------------------------------------------------------------------------------

    def work(self, node: str, slots: int, have: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Up to `slots` executions for `node` to start.

        `have`: what the supervisor knows that it has. Executions that were handed to it in an answer that never arrived come first.
        """
        items = self._unseen(node, have) if have is not None else []
        while self._queue and len(items) < slots:
            group, index = heapq.heappop(self._queue)
            items.append(self._start(group, index, node))
        return items

    def begin(self, group: int, node: str) -> list[dict[str, Any]]:
        """All executions of a group, started: those that wait, and those that live already. KeyError: there is no such group."""
        if group not in self._groups:
            raise KeyError(f"there is no group {group}")
        waiting = [index for number, index in self._queue if number == group]
        self._queue = [entry for entry in self._queue if entry[0] != group]
        heapq.heapify(self._queue)
        for index in sorted(waiting):
            self._start(group, index, node)
        return [self._item(self._live[place.live]) for place in self._groups[group].places if place.live is not None]

    def end(
        self, execution: int, reason: str, score: float, valid: bool, seconds: float, detail: str = "", calls: int = 0, tokens: int = 0
    ) -> bool:
        """The execution is over for good. False when it was over (or lost) before. KeyError: never existed.

        A valid one without any model call is a failure of ours and counts as lost (tasks.md: never a scored timeout).
        """
        if valid and calls == 0:
            return self.lost(execution, NO_CALLS, f"{reason}: it made no model call")
        live = self._take(execution)
        if live is None:
            return False
        end = ExecutionEnd(execution, reason, score, valid, calls, tokens, seconds, detail)
        self._finish(live.record, end)
        return True

    def lost(self, execution: int, reason: str, detail: str = "", calls: int = 0, tokens: int = 0) -> bool:
        """The attempt is void: tried again, or, with the budget for `reason` spent, given up as invalid. False, KeyError as in `end`."""
        live = self._take(execution)
        if live is None:
            return False
        record = live.record
        place = self._place(record)
        place.losses[reason] += 1
        seconds = self._clock() - live.started
        given_up = reason not in FREE and place.losses[reason] > self._retries
        told = {"reason": reason, "detail": detail, "given_up": given_up, "node": live.node}
        event = ("execution.lost", {**identity(record), **told})
        if given_up:
            self.changes.stage(None, event)
            tries = f"given up after {place.losses[reason]} tries: {detail}"
            self._finish(record, ExecutionEnd(execution, reason, 0.0, False, calls, tokens, seconds, tries))
            return True
        self._lost += 1
        self._store.append(ExecutionEnd(execution, LOST + reason, 0.0, False, calls, tokens, seconds, detail))
        heapq.heappush(self._queue, (record.group, record.index))
        self.changes.stage({"kind": "lost", **identity(record), "reason": reason}, event)
        return True

    def on_node(self, node: str) -> list[int]:
        """Executions that a node has."""
        return [execution for execution, live in self._live.items() if live.node == node]

    def execution_of(self, secret: str) -> int | None:
        """The live execution that a harness's secret stands for, None for a wrong one. Raises Over: the execution is over."""
        return self._admission.execution_of(secret)

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _add(self, group: Group) -> None:
        self._groups[group.group] = GroupState(group, [Place() for _ in range(group.size)])
        self.next_group = max(self.next_group, group.group + 1)

    def _start(self, group: int, index: int, node: str) -> dict[str, Any]:
        place = self._groups[group].places[index]
        record = Execution(self._store.allocate_execution(), group, index, place.attempts)
        self._store.append(record)
        place.attempts += 1
        place.live = record.execution
        live = self._live[record.execution] = Live(record, node, self._clock())
        self._admission.admit(record.execution)
        self._handed.setdefault(node, set()).add(record.execution)
        self.changes.stage({"kind": "started", **identity(record), "node": node})
        return self._item(live)

    def _unseen(self, node: str, have: Iterable[int]) -> list[dict[str, Any]]:
        """Costs what is on its way to this node, however many executions live: every node asks again at every change."""
        handed = self._handed.get(node)
        if not handed:
            return []
        handed.difference_update(have)
        return [self._item(self._live[execution]) for execution in sorted(handed)]

    def _item(self, live: Live) -> dict[str, Any]:
        record = live.record
        place = f"{self._seed}/{record.group}/{record.index}/{record.attempt}"
        return {
            **identity(record),
            "task": self._groups[record.group].record.task,
            "secret": self._admission.secret(record.execution),
            "seed": int.from_bytes(hashlib.sha256(place.encode()).digest()[:8]) >> 11,
            "retries_left": self._retries - self._place(record).charged,
        }

    def _take(self, execution: int) -> Live | None:
        """The live execution, no longer live; None if it is over."""
        live = self._live.pop(execution, None)
        if live is not None:
            self._handed.get(live.node, set()).discard(execution)
            self._over.add(execution)
            self._place(live.record).live = None
            self._admission.end(execution)
            return live
        if execution not in self._over:
            raise KeyError(f"there is no execution {execution}")
        return None

    def _place(self, record: Execution) -> Place:
        return self._groups[record.group].places[record.index]

    def _finish(self, record: Execution, end: ExecutionEnd) -> None:
        self._store.append(end)
        self._place(record).end = end
        self._finished += 1
        outcome = {"reason": end.reason, "score": end.score, "valid": end.valid}
        self.changes.stage({"kind": "ended", **identity(record), **outcome}, ("execution.end", end_event(record, end)))
        valid = self._groups[record.group].valid
        if valid is not None:
            self.changes.stage({"kind": "complete", "group": record.group, "valid": valid})
