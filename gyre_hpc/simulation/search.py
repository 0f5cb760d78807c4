"""Which schedule suits a workload: every cut of the nodes, mode, phi and mu within the staleness that is allowed, tried in the simulator.

Successive halving: all candidates on one seed and a window of the run, the best of each mode on more seeds, the finalists on all seeds and
the whole run. Candidates run the same executions under a seed, so few seeds tell them apart. No rule of thumb decides.

Invariant: a round simulates no more than MOST executions and transfers: a search that would is thinned, evenly over all candidates, and has
fewer seeds; what can't be thinned to that, and nodes that no schedule has an execution for, are refused with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from cells.events import Mode, Schedule
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.simulation.facts import Facts
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.scenario import Scenario, beyond, cut

WINDOW = 12
"""Steps of the first rounds."""
MUS = (1, 2, 3, 4, 6, 8)
PHIS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SPLITS = 12
"""Ways to split the nodes that are tried for async."""
FINALISTS = 6
MOST = 3_000_000
"""Executions and transfers that a round simulates: about a minute and a half of one core."""
SCALES = (0.9, 0.95, 0.975, 1.0, 1.025, 1.05, 1.1)
"""Of the slots, around the best one."""
FEWEST = 12
"""Candidates below which a search is none."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One schedule on one cut of the nodes."""

    mode: str
    cells: int
    nodes_per_cell: int
    standalone: int
    phi: float
    mu: int

    @property
    def shape(self) -> tuple[str, int, int]:
        """What makes two of them different at heart."""
        return self.mode, self.cells, self.standalone

    def overrides(self, smallest: int) -> list[str]:
        """The configuration that runs it, as overrides.

        `smallest`: nodes of a cell where the mode does not care (all trainers move together, or never).
        """
        size = self.nodes_per_cell if self.mode == Mode.ELASTIC.value else smallest
        cells = self.cells * self.nodes_per_cell // size
        found = [f"cells.count={cells}", f"cells.nodes_per_cell={size}", f"cells.standalone={self.standalone}"]
        return [
            *found,
            f"schedule.mode={self.mode}",
            f"schedule.phi={self.phi:g}",
            f"schedule.mu={self.mu}",
            "schedule.trainers=null",
            "schedule.join_late=true",
            "schedule.streaming=true",
            "schedule.shuffle=false",
        ]

    def scenario(self, facts: Facts, steps: int, window: bool = False, slots: float = 1.0) -> Scenario:
        """It on the facts; `window`: about so many steps of a longer run; `slots` scales how many executions a node holds."""
        f, mode = facts, Mode(self.mode)
        schedule = Schedule(
            (1,), f.groups_per_step, f.group_size, self.phi, self.mu, steps, staleness_bound=f.staleness_bound, mode=mode, join_late=True
        )
        schedule, end = beyond(schedule, steps) if window else (schedule, None)
        nodes = self.cells * self.nodes_per_cell + self.standalone
        held = f.slots_per_node * slots
        made = cut(schedule, nodes, self.cells, held, f.train_group, f.work, self.standalone, f.beta, f.costs)
        return f.expected.put(replace(made, window=end))


@dataclass(frozen=True)
class Tried:
    """A candidate with what it did, one outcome a seed."""

    candidate: Candidate
    outcomes: tuple[Outcome, ...]

    @property
    def seconds(self) -> float:
        return fmean(outcome.seconds for outcome in self.outcomes)

    @property
    def pace(self) -> float:
        """Seconds a step."""
        return fmean(outcome.seconds / len(outcome.steps) for outcome in self.outcomes)

    def mean(self, name: str) -> float:
        """The mean of one of the outcomes' numbers."""
        return fmean(getattr(outcome, name) for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        seconds = [outcome.seconds for outcome in self.outcomes]
        return {
            **vars(self.candidate),
            "seconds": round(self.seconds, 1),
            "low": round(min(seconds), 1),
            "high": round(max(seconds), 1),
            "idle": round(self.mean("idle"), 4),
            "staleness": round(self.mean("staleness"), 3),
            "bound_seconds": round(self.mean("bound"), 1),
            "over_bound": round(self.seconds / self.mean("bound") - 1, 4),
            "moved": round(self.mean("moved"), 1),
            "moved_bytes": round(self.mean("moved_bytes")),
            "moved_seconds": round(self.mean("moved_seconds"), 1),
            "faults": round(self.mean("faults"), 2),
            "deaths": round(self.mean("deaths"), 2),
        }


def candidates(nodes: int, smallest: int, staleness: float) -> list[Candidate]:
    """All of them. Raises ConfigError when `nodes` don't hold one cell."""
    if nodes < smallest:
        raise ConfigError(f"{nodes} nodes don't hold one cell of {smallest}", "give more nodes, or a smaller --smallest-cell")
    found = []
    for mode, cells, per_cell, standalone in dict.fromkeys(_cuts(nodes, smallest)):  # two sizes may make the same cut
        for phi, mu in _settings(staleness):
            found.append(Candidate(mode.value, cells, per_cell, standalone, phi, mu))
    return found


def _settings(staleness: float) -> Iterator[tuple[float, int]]:
    for mu in MUS:
        for phi in PHIS:
            if phi + (mu - 1) / 2 <= staleness + 1e-9:
                yield phi, mu


def _cuts(nodes: int, smallest: int) -> Iterator[tuple[Mode, int, int, int]]:
    """(mode, cells, nodes of a cell, standalone nodes); what does not make a whole cell is standalone."""
    units = nodes // smallest
    for size in (size for size in (1, 2, 4, 8) if size <= units):
        for pool in sorted({0, 1, units // 8, units // 4}):
            cells = (units - pool) // size
            if cells >= 1:
                yield Mode.ELASTIC, cells, size * smallest, nodes - cells * size * smallest
    for pool in sorted({0, 1, units // 8, units // 4}):
        if units > pool:
            yield Mode.COLOCATE, 1, (units - pool) * smallest, nodes - (units - pool) * smallest
    for trainers in sorted({max(1, round(units * k / (SPLITS + 1))) for k in range(1, SPLITS + 1)}):
        if trainers * smallest < nodes:
            yield Mode.ASYNC, 1, trainers * smallest, nodes - trainers * smallest


def search(facts: Facts, nodes: int, staleness: float, seeds: int, tell: Callable[[str], None] = lambda _: None) -> tuple[list[Tried], int]:
    """The finalists, best first, at least one of each mode that fits; and how many candidates there were."""
    bound = facts.staleness_bound
    everything = [c for c in candidates(nodes, facts.smallest_cell, staleness) if bound is None or c.mu - 1 <= bound]
    _check_use(facts, nodes, staleness)
    window = min(WINDOW, facts.steps)
    short = window < facts.steps
    chosen = _thinned(everything, facts, window)
    first = _try(chosen, facts, window, short, 1, tell)
    kept = _best_of_modes(first, max(4, len(chosen) // 16))
    second = _try(kept, facts, window, short, _affordable(kept, facts, window, min(3, seeds)), tell)
    last = sorted({*_best(second, FINALISTS), *_best_of_modes(second, 1)})
    tried = _try(last, facts, facts.steps, False, _affordable(last, facts, facts.steps, seeds), tell)
    return sorted(tried, key=lambda t: t.seconds), len(chosen)


def _check_use(facts: Facts, nodes: int, staleness: float) -> None:
    """ConfigError for more cells than there are ever executions."""
    cells = nodes // facts.smallest_cell
    ahead = max(phi + mu for phi, mu in _settings(staleness))
    most = math.ceil(ahead * facts.groups_per_step) * facts.group_size
    if cells > most:
        what = f"{nodes} nodes are {cells} cells of {facts.smallest_cell}, and no schedule has more than {most} executions under way"
        why = f"{ahead:g} steps of {facts.groups_per_step} x {facts.group_size}"
        raise ConfigError(
            f"{what} ({why})", f"give at most --nodes {most * facts.smallest_cell}, more --groups-per-step, or more --staleness"
        )


def _cost(chosen: Sequence[Candidate], facts: Facts, steps: int) -> int:
    """Executions and transfers of one seed."""
    return sum(steps * facts.groups_per_step * facts.group_size + 2 * c.cells * math.ceil(steps / c.mu) for c in chosen)


def _thinned(everything: list[Candidate], facts: Facts, window: int) -> list[Candidate]:
    """As many as may be simulated once, and whose finalists may. Raises ConfigError where that is no search."""
    every = math.ceil(_cost(everything, facts, window) / MOST)
    last = _cost(everything, facts, facts.steps) * (FINALISTS + len(Mode)) // len(everything)
    settings = len({(c.phi, c.mu) for c in everything})
    # no common divisor: or else each cut would be tried with the same few of its settings
    while every < len(everything) and (math.gcd(every, settings) > 1 or _cost(everything[::every], facts, window) > MOST):
        every += 1
    chosen = everything[::every]
    if every > 1 and len(chosen) < FEWEST:
        what = f"{window} steps of {facts.groups_per_step} x {facts.group_size} executions, {len(everything)} candidates"
    elif last > 4 * MOST:
        what = f"{facts.steps} steps of {facts.groups_per_step} x {facts.group_size} executions, {FINALISTS + len(Mode)} finalists"
    else:
        return chosen
    raise ConfigError(
        f"{what}: that is too much to simulate",
        f"give fewer --steps (a round has at most {MOST:,} executions), or plan for a tenth of nodes and groups",
    )


def _affordable(chosen: Sequence[Candidate], facts: Facts, steps: int, seeds: int) -> int:
    """How many of the seeds may be simulated, at least one."""
    return max(1, min(seeds, MOST // _cost(chosen, facts, steps)))


def _try(chosen: Sequence[Candidate], facts: Facts, steps: int, window: bool, seeds: int, tell: Callable[[str], None]) -> list[Tried]:
    """Those that get to the end; with many faults some never do. Raises GyreError when none does."""
    out, last = [], None
    for number, candidate in enumerate(chosen):
        tell(f"{number} of {len(chosen)} candidates, {steps} steps, {seeds} seed{'s' if seeds > 1 else ''}")
        scenario = candidate.scenario(facts, steps, window)
        try:
            out.append(Tried(candidate, tuple(simulate(scenario, seed) for seed in range(seeds))))
        except GyreError as error:
            last = error
    if not out and last is not None:
        raise last
    return out


def _best(tried: Sequence[Tried], count: int) -> list[Candidate]:
    """The best ones, no two of one shape: what differs in phi alone is no alternative."""
    found: dict[tuple[str, int, int], Candidate] = {}
    for one in sorted(tried, key=lambda t: t.pace):
        found.setdefault(one.candidate.shape, one.candidate)
    return list(found.values())[:count]


def _best_of_modes(tried: Sequence[Tried], count: int) -> list[Candidate]:
    """The best `count` of each mode."""
    out = []
    for mode in Mode:
        of_mode = sorted((t for t in tried if t.candidate.mode == mode.value), key=lambda t: t.pace)
        out += [t.candidate for t in of_mode[:count]]
    return out


def slopes(best: Candidate, facts: Facts, seeds: int) -> list[tuple[float, float]]:
    """(scale of the slots, seconds) around the best one: a cliff shows as a jump."""
    found = []
    seeds = _affordable([best] * len(SCALES), facts, facts.steps, seeds)
    for scale in SCALES:
        scenario = best.scenario(facts, facts.steps, slots=scale)
        found.append((scale, fmean(simulate(scenario, seed).seconds for seed in range(seeds))))
    return found
