"""The policy's rules out of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from cells.events import Mode, Schedule
from gyre_hpc.config import Config
from gyre_hpc.layout import cell_capacities


def schedule_of(config: Config, held: Sequence[int] | None = None) -> Schedule:
    """The policy's rules, from the configuration; `held`: executions that each cell holds, the standalone ones behind the others."""
    s = config.schedule
    held = cell_capacities(config) if held is None else held
    return Schedule(
        capacity=tuple(held[: config.cells.count]),
        standalone_capacity=sum(held[config.cells.count :]),
        groups_per_step=s.groups_per_step,
        group_size=s.group_size,
        phi=s.phi,
        mu=s.mu,
        steps=config.run.steps,
        staleness_bound=s.staleness_bound,
        mode=Mode(s.mode),
        streaming=s.streaming,
        trainers=s.trainers,
        join_late=s.join_late,
    )
