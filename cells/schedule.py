"""Schedules that can't work: refused before they start (`check_schedule`), or found out on the way (`ScheduleStuck`)."""

from __future__ import annotations

from cells.events import Mode, Schedule


class ScheduleStuck(Exception):
    """Going on would never end: the same transfer fails again and again, or no group has a valid execution any more."""


def check_schedule(schedule: Schedule) -> None:
    """ValueError with one line for a schedule that can't work."""
    if not schedule.capacity or min(schedule.capacity) < 1 or schedule.standalone_capacity < 0:
        raise ValueError(f"capacity {schedule.capacity}, standalone {schedule.standalone_capacity}: every cell needs at least one slot")
    for name in ("groups_per_step", "group_size", "mu", "steps"):
        if getattr(schedule, name) < 1:
            raise ValueError(f"{name} = {getattr(schedule, name)}: must be 1 or more")
    if schedule.phi < 0:
        raise ValueError(f"phi = {schedule.phi}: must be 0 or more")
    if not 1 <= schedule.training_cells <= len(schedule.capacity):
        raise ValueError(f"trainers = {schedule.trainers}: must be 1 to {len(schedule.capacity)}, the number of cells")
    if schedule.mode is Mode.ASYNC and schedule.capacity_from[schedule.training_cells] < 1:
        raise ValueError("async needs cells that never train, or a standalone pool: nothing would be left for rollout")
    bound = schedule.staleness_bound
    if bound is not None and bound < schedule.mu - 1:
        raise ValueError(f"staleness_bound = {bound}: a burst of mu = {schedule.mu} steps needs at least {schedule.mu - 1}")
