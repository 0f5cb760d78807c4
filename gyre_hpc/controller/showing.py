"""What the controller shows of itself in `live.json` (live.py): the policy's state, recent scores, the gateway's counts.

Invariant: nothing waits here: the counts are those that came last, and a file that can't be written is a warning.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from cells.policy import Policy
from gyre_hpc.config import Config
from gyre_hpc.controller.live import Counts, LiveFile

logger = logging.getLogger(__name__)


class Showing:
    """Of one attempt; `ask` the gateway's status, in `pool`."""

    def __init__(self, config: Config, attempt: int, path: Path, ask: Callable[[], dict[str, Any]], pool: Executor) -> None:
        self._attempt, self._steps = attempt, config.run.steps
        self._file, self._counts = LiveFile(path), Counts(ask, pool)
        self._recent: deque[float] = deque(maxlen=config.schedule.groups_per_step * config.schedule.group_size)

    def scored(self, score: float) -> None:
        """A valid execution has ended."""
        self._recent.append(score)

    def show(self, policy: Policy, standalone: int, activity: str) -> None:
        """About once a second; `activity`: what is under way, or empty."""
        if self._file.due():
            self._counts.refresh()
            self.last(policy, standalone, activity)

    def last(self, policy: Policy, standalone: int, activity: str) -> None:
        """At once, with the counts as they are."""
        status = self._counts.newest
        error = self._file.write(
            {
                "attempt": self._attempt,
                "step": policy.step,
                "steps": self._steps,
                "version": policy.published,
                "burst": policy.burst,
                "roles": [state.value for state in policy.roles.states],
                "standalone": standalone,
                "activity": activity,
                "waterlevel": policy.waterlevel,
                "score_recent": round(sum(self._recent) / len(self._recent), 4) if self._recent else None,
                "tokens_per_second": status.get("tokens_per_second", 0.0),
                "executions": {name: status.get(name, 0) for name in ("queued", "live", "finished", "lost")},
                "calls": {name: status.get(name, 0) for name in ("in_flight", "held")},
            }
        )
        if error is not None:
            logger.warning("live.json: %s", error)
