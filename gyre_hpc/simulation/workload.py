"""How long executions take: parametric distributions, or what a run recorded.

Invariant: what is drawn depends on (seed, group, index) alone, never on the order of questions, so two schedules compared under one seed
run the same executions. Durations are seconds of work: wall clock on an engine that the execution has for itself.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gyre_hpc.errors import GyreError
from gyre_hpc.simulation.sessions import GROUP_SPREAD, active_seconds

_BLOCK = 64
"""Groups drawn at once."""


@dataclass(frozen=True)
class Limits:
    """Wall-clock budgets of an execution, seconds. The harness's own is scored; one cut by the overall one does not count."""

    harness: float = math.inf
    overall: float = math.inf

    @property
    def first(self) -> float:
        return min(self.harness, self.overall)

    @property
    def valid(self) -> bool:
        """Whether an execution that is cut counts."""
        return self.harness <= self.overall


class Workload(Protocol):
    """Where executions come from."""

    @property
    def limits(self) -> Limits:
        """Budgets of its executions."""
        ...

    def group(self, seed: int, group: int, size: int) -> Sequence[float]:
        """Seconds of work of each of the `size` executions of `group`."""
        ...

    def skipped(self, seed: int, group: int) -> bool:
        """Whether none of them may be trained on, however they end (their evaluators failed, say)."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """Log-normal work: `mean` seconds (before any limit), spread of the task's effect, spread inside a group (sigmas of the logarithm).

    `skips`: the share of groups without a valid execution."""

    mean: float
    task_spread: float
    group_spread: float
    limits: Limits = Limits()
    skips: float = 0.0
    _blocks: dict[tuple[int, int, int], list[list[float]]] = field(default_factory=dict, repr=False, compare=False)

    def group(self, seed: int, group: int, size: int) -> Sequence[float]:
        key = (seed, group // _BLOCK, size)
        if key not in self._blocks:
            if len(self._blocks) > 256:
                self._blocks.clear()
            self._blocks[key] = self._draw(*key)
        return self._blocks[key][group % _BLOCK]

    def skipped(self, seed: int, group: int) -> bool:
        return self.skips > 0 and float(np.random.default_rng((seed, group, 1)).random()) < self.skips

    def _draw(self, seed: int, block: int, size: int) -> list[list[float]]:
        chance = np.random.default_rng((seed, block))
        logs = self.task_spread * chance.standard_normal((_BLOCK, 1)) + self.group_spread * chance.standard_normal((_BLOCK, size))
        middle = math.log(self.mean) - (self.task_spread**2 + self.group_spread**2) / 2
        drawn: list[list[float]] = np.exp(middle + logs).tolist()
        return drawn


@dataclass(frozen=True)
class Recorded:
    """Groups that were recorded, drawn again at random as wholes, so that a task's effect stays; `groups` in seconds.

    `replay`: in the order in which they were dispatched instead, from the start again when they are used up. `spread`: sigma of log time
    around the one duration of a group that was recorded once and is drawn as several (0: all of them take that long). `void`: places of the
    groups that had no valid execution, and have none when they are drawn again.
    """

    groups: tuple[tuple[float, ...], ...]
    limits: Limits = Limits()
    replay: bool = False
    spread: float = 0.0
    void: frozenset[int] = frozenset()

    def group(self, seed: int, group: int, size: int) -> Sequence[float]:
        if self.replay and len(self.groups[group % len(self.groups)]) == size:
            return self.groups[group % len(self.groups)]
        chance = np.random.default_rng((seed, group))
        found = self.groups[int(chance.integers(len(self.groups)))]
        if len(found) == size:
            return found
        if len(found) == 1 and self.spread > 0:
            factors = np.exp(self.spread * chance.standard_normal(size) - self.spread**2 / 2)
            return [float(found[0] * factor) for factor in factors]
        return [found[int(i)] for i in chance.integers(len(found), size=size)]

    def skipped(self, seed: int, group: int) -> bool:
        if not self.void:
            return False
        place = group % len(self.groups) if self.replay else int(np.random.default_rng((seed, group)).integers(len(self.groups)))
        return place in self.void

    @property
    def executions(self) -> int:
        return sum(map(len, self.groups))

    @property
    def mean(self) -> float:
        return sum(map(sum, self.groups)) / self.executions


def read_recorded(path: Path) -> Recorded:
    """Durations out of JSON lines: a run's events.jsonl, lines {"group", "seconds"} of anybody's, or recorded sessions
    (gyre_hpc/simulation/sessions.py); `.gz` is unpacked. Raises GyreError.

    Of an event log the lines of kind `execution.end` count; executions that never ran (0 s) are left out. One with `valid` false may not be
    trained on.
    """
    groups: dict[Any, list[float]] = {}
    valid: set[Any] = set()
    spread = 0.0
    try:
        lines = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "this is no text"
        raise GyreError(f"{path}: {why}", "give a run's directory, or a file of JSON lines with group and seconds") from None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if entry.get("kind", "execution.end") != "execution.end":
                continue
            session = "requests" in entry
            group, seconds = (entry.get("id", number), active_seconds(entry)) if session else (entry["group"], float(entry["seconds"]))
            if not 0 <= seconds < math.inf:
                raise ValueError(seconds)
            spread = GROUP_SPREAD if session else spread
            if entry.get("valid", True):
                valid.add(group)
            if seconds > 0:
                groups.setdefault(group, []).append(seconds)
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines) and "kind" in line:  # a run that is writing
                continue
            raise GyreError(f"{path}, line {number}: no JSON object with group and seconds", "mend that line or leave it out") from None
    if not groups:
        raise GyreError(f"{path} tells of no execution that ended", "wait until the run has some, or give another file")
    order = sorted(groups) if all(isinstance(group, int) for group in groups) else list(groups)
    if not valid & groups.keys():
        raise GyreError(f"{path} tells of no execution that may be trained on", "see why they end (`reason`), or give another file")
    void = frozenset(place for place, group in enumerate(order) if group not in valid)
    return Recorded(tuple(tuple(groups[group]) for group in order), spread=spread, void=void)
