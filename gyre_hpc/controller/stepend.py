"""What is told of a step that ends: the controller's part of `step.end`, written into the checkpoint before the event log has it.

Should the process die between the two the next attempt tells it from the checkpoint (resuming.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_hpc.controller.groups import Groups
from gyre_hpc.controller.plan import GroupPlan


def trained(step: int, plans: Sequence[tuple[int, GroupPlan]], groups: Groups, prefix: int, attempt: int) -> dict[str, Any]:
    """The fields that the groups of the step decide; `plans`: each group with its plan, `prefix`: cells that train."""
    executions = sum(plan.executions for _, plan in plans)
    return {
        "step": step,
        "score_mean": sum(plan.score_sum for _, plan in plans) / max(1, executions),
        "staleness_mean": sum(step - 1 - groups[group].counts_as for group, _ in plans) / max(1, len(plans)),
        "target_tokens": sum(plan.targets for _, plan in plans),
        "executions": executions,
        "groups": [group for group, _ in plans],
        "group_versions": [groups[group].version for group, _ in plans],
        "untrained": sum(plan.skipped for _, plan in plans),
        "microsteps": sum(len(plan.work.items) for _, plan in plans),
        "cells": prefix,
        "attempt": attempt,
    }


def closing(reports: Sequence[dict[str, Any]]) -> float:
    """Seconds of a close without the waiting for whoever worked longest: that of the cell which came last, or the core's, where the sum's
    own time is again that of the last one (without new weights for satellites the core ends after them)."""
    waited = reports[0]["reduce_seconds"] - min(report["reduce_seconds"] for report in reports)
    return float(round(max(reports[0]["close_seconds"] - waited, min(report["close_seconds"] for report in reports)), 4))
