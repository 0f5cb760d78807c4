"""Durations out of recordings of people's sessions (a line a session: `requests` with `t`, `api_time`, `think_time`, seconds); no content.

A person pauses, an agent does not: what passes between an answer and the next request counts for at most IDLE seconds. Time in which a
sub-agent works counts whole. Source of the constants: 676 Claude Code sessions and leaderboard runs, summarised beside the recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDLE = 60.0
"""Seconds of a pause that may be a tool's; the rest is a person's."""
GROUP_SPREAD = 0.26
"""Sigma of log time between runs of one task (Terminal-Bench leaderboard runs): a session is recorded once, a group runs it N times."""


def active_seconds(session: Mapping[str, Any]) -> float:
    """Seconds in which the session's agent or a tool of it worked: the length of the union of their intervals.

    Raises KeyError, TypeError or ValueError for what is no session.
    """
    spans = []
    for request in session["requests"]:
        start = float(request["t"])
        if request.get("type") == "subagent":
            spans.append((start, start + float(request.get("duration_ms") or 0.0) / 1000))
            continue
        pause = min(IDLE, max(0.0, float(request.get("think_time") or 0.0)))
        spans.append((start - pause, start + float(request.get("api_time") or 0.0)))
    active, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        active += max(0.0, end - max(start, until))
        until = max(until, end)
    return active
