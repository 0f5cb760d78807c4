"""What a simulated run measured; the recorder collects while it runs.

Busy node time: trainers while they compute, and rollout nodes by the share of their slots that is in use. Idle is the rest, transfers and
waiting included, so `bound` (all work without any idle time, engines full) is what no schedule on these nodes can beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from cells.policy import Policy
from gyre_hpc.report.summary import Span
from gyre_hpc.simulation.fleet import Fleet
from gyre_hpc.simulation.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """One simulated run; times in seconds."""

    seconds: float
    idle: float
    """Share of all node time."""
    idle_rollout: float
    """The part of it that rollout nodes had slots empty; the rest is trainers without work, transfers and faults."""
    bound: float
    """Seconds that the same work takes without any idle node."""
    staleness: float
    """Mean over the trained groups."""
    staleness_max: int
    executions: int
    execution_mean: float
    """Seconds on an engine."""
    query_mean: float
    """Seconds of the slowest execution of a group."""
    cut: int
    """Executions that a time limit ended."""
    transfers: int
    moved: int
    """Executions that changed their engine."""
    skipped: int
    faults: int
    deaths: int
    """Engines that died while they served."""
    moved_bytes: float
    """KV that travelled with executions."""
    moved_seconds: float
    """That all executions together waited when they changed their engine."""
    steps: tuple[float, ...]
    """When each step was done."""
    began: float
    """When the first group was dispatched (async moves its trainers before that)."""
    spans: tuple[Span, ...] = ()
    load: tuple[tuple[float, int], ...] = ()
    """(time, executions on engines or in the queue)."""


class Recorder:
    """Adds up while a simulation runs."""

    def __init__(self, scenario: Scenario, record: bool) -> None:
        self.executions = self.cut = self.transfers = self.deaths = 0
        self.moved_bytes = self.moved_seconds = 0.0
        self._scenario = scenario
        self._record = record
        self._busy = self._open = 0.0
        """Node-seconds of slots in use, and of nodes in rollout."""
        self._since = 0.0
        self._seconds = self._query_seconds = 0.0
        self._queries = 0
        self._steps: list[float] = []
        self._began: float | None = None
        self._stale: list[int] = []
        self._faults = 0
        self._spans: list[Span] = []
        self._load: list[tuple[float, int]] = []
        self._roles: list[tuple[str, float]] = [("rollout", 0.0)] * len(scenario.nodes)
        self._serving = scenario.all_nodes
        """Nodes in rollout now."""

    def rolled(self, now: float, fleet: Fleet) -> None:
        """Time goes on to `now`; called before anything in the fleet changes."""
        passed = now - self._since
        if passed > 0:
            self._busy += passed * fleet.busy
            self._open += passed * self._serving
            self._since = now
            if self._record:
                self._load.append((now, fleet.live + len(fleet.queue)))

    def dispatch(self, now: float) -> None:
        """A group is dispatched."""
        self._began = now if self._began is None else self._began

    def execution(self, seconds: float) -> None:
        """One is over, after so many seconds."""
        self.executions += 1
        self._seconds += seconds

    def query(self, seconds: float) -> None:
        """A group is complete; its slowest execution took so long."""
        self._queries += 1
        self._query_seconds += seconds

    def role(self, cell: int, state: str, now: float) -> None:
        """A cell's state changes."""
        old, since = self._roles[cell]
        if state == "transfer" and old == "rollout":
            self._serving -= self._scenario.nodes[cell]
        elif state == "rollout":
            self._serving += self._scenario.nodes[cell]
        if self._record and now > since:
            self._spans.append(Span(cell, old, since, now))
        self._roles[cell] = (state, now)

    def step(self, step: int, now: float, versions: list[int]) -> None:
        """A step is done; `versions` of its groups at their dispatch."""
        self._steps.append(now)
        self._stale += [step - 1 - version for version in versions]

    def fault(self, now: float, fleet: Fleet) -> None:
        """The attempt ends."""
        self.rolled(now, fleet)
        self._faults += 1
        for cell in range(len(self._roles)):
            self.role(cell, "down", now)
        self._serving = 0

    def resume(self, now: float) -> None:
        """The next attempt begins, all cells in rollout."""
        self._since = now
        self._serving = self._scenario.standalone_nodes
        for cell in range(len(self._roles)):
            self.role(cell, "rollout", now)

    def result(self, now: float, trained: float, fleet: Fleet, policy: Policy) -> Outcome:
        """The run is over; `trained` node-seconds of training in all."""
        self.rolled(now, fleet)
        for cell in range(len(self._roles)):
            self.role(cell, "end", now)
        nodes = self._scenario.all_nodes
        worked = trained + self._busy
        return Outcome(
            seconds=now,
            idle=1 - worked / (nodes * now),
            idle_rollout=(self._open - self._busy) / (nodes * now),
            bound=worked / nodes,
            staleness=sum(self._stale) / max(1, len(self._stale)),
            staleness_max=max(self._stale, default=0),
            executions=self.executions,
            execution_mean=self._seconds / max(1, self.executions),
            query_mean=self._query_seconds / max(1, self._queries),
            cut=self.cut,
            transfers=self.transfers,
            moved=fleet.moved,
            skipped=policy.skipped,
            faults=self._faults,
            deaths=self.deaths,
            moved_bytes=self.moved_bytes,
            moved_seconds=self.moved_seconds,
            steps=tuple(self._steps),
            began=self._began or 0.0,
            spans=tuple(self._spans),
            load=tuple(self._load),
        )
