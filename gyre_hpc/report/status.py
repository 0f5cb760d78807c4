"""`gyre status`: how far a run is, from its files alone (events.jsonl, live.json); never asks Slurm or a process.

Invariant: works while the run writes, and on a run that died: what is stale is said to be stale. live.json tells of the attempt that wrote
it only: until the next one's is there, the driver's lock says whether that attempt comes up or is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gyre_hpc.checkpoint import aside
from gyre_hpc.controller.live import read_live
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.summary import Summary, summarise
from gyre_hpc.viewing import see

STALE = 10.0
"""Seconds after which live.json no longer tells about now."""
UNHELD = 60.0
"""And after which a driver's lock, which is renewed every ten, doesn't (as driver/runlock.py has it)."""


def collect(paths: RunPaths) -> dict[str, Any]:
    """A JSON-able picture of the run."""
    summary = summarise(read_events(paths.events))
    live = read_live(paths.live)
    fresh = live is not None and time.time() - float(live["t"]) < STALE and not summary.ended
    last = summary.steps[-1] if summary.steps else {}
    config = see(paths.config).config
    return {
        "run": str(paths.root),
        "state": summary.ended or ("running" if fresh else "starting" if _comes_up(paths, summary, live) else "no sign of life"),
        "attempt": len(summary.attempts),
        "step": summary.step,
        "steps": 0 if config.upstream.urls else config.run.steps,
        "score_first": summary.steps[0]["score_mean"] if summary.steps else None,
        "score_last": last.get("score_mean"),
        "loss": last.get("loss"),
        "staleness_mean": last.get("staleness_mean"),
        "checkpoint": summary.checkpoint,
        "damaged": [path.name for path in aside(paths)],
        "transfers": len(summary.transfers),
        "transfers_while_live": summary.live_transfers,
        "endings": dict(summary.endings),
        "lost": sum(summary.lost.values()),
        "tokens": summary.tokens,
        "seconds": round(summary.ran, 1),
        "warnings": summary.warnings,
        "placement": list(summary.placement),
        "failure": summary.failures[-1]["what"] if summary.failures else None,
        "remedy": summary.failures[-1].get("remedy") if summary.failures else None,
        "live": live if fresh else None,
    }


def _comes_up(paths: RunPaths, summary: Summary, live: dict[str, Any] | None) -> bool:
    """No attempt began (it is in the queue, say), or the last one has shown nothing of itself yet and its driver holds the run."""
    if not summary.attempts:
        return True
    if live is not None and float(live["t"]) >= summary.zero + summary.attempts[-1] - 0.001:  # both are rounded
        return False
    try:
        return time.time() - paths.lock.stat().st_mtime < UNHELD
    except OSError:
        return False


def render(found: dict[str, Any]) -> str:
    """A few lines for a terminal or `tail`."""
    steps = f"step {found['step']} of {found['steps']}" if found["steps"] else "recording alone"
    lines = [f"{found['run']}: {found['state']}, {steps}, attempt {found['attempt']}, {found['seconds']:.0f} s"]
    if found["score_last"] is not None:
        lines.append(
            f"score {found['score_first']:.3f} -> {found['score_last']:.3f}, loss {found['loss']:.4f}, "
            f"staleness {found['staleness_mean']:.2f}, last checkpoint: step {found['checkpoint']}"
        )
    endings = ", ".join(f"{count} {reason}" for reason, count in found["endings"].items()) or "none has ended yet"
    lines.append(f"executions: {endings}; lost and tried again: {found['lost']}; {found['tokens']} tokens")
    if found["steps"]:
        lines.append(f"transfers: {found['transfers']}, {found['transfers_while_live']} of them while executions were live")
        lines.extend(found["placement"])
    if found["damaged"]:
        lines.append(f"checkpoints that could not be used and are kept: {', '.join(found['damaged'])}")
    if found["warnings"]:
        lines.append(f"warnings: {found['warnings']} forks of histories that nothing explains (warning.fork in events.jsonl)")
    live = found["live"]
    if live:
        roles = _roles(live["roles"])
        counts = live["executions"]
        pool = f" and {live['standalone']} standalone" if live.get("standalone") else ""
        cells = f"cells {roles}{pool}; " if roles else ""
        lines.append(f"{cells}{counts['live']} live, {counts['queued']} queued; {live['tokens_per_second']:.0f} tokens/s")
    if found["failure"] and found["state"] not in ("running", "done"):
        lines.append(f"last failure: {found['failure']}; {found['remedy']}")
    return "\n".join(lines)


def _roles(roles: Sequence[str]) -> str:
    """`0:training 1:rollout`; neighbours of one role together: `0-9:training 10-63:rollout`."""
    found, first = [], 0
    for role, group in groupby(roles):
        last = first + sum(1 for _ in group) - 1
        found.append(f"{first}:{role}" if first == last else f"{first}-{last}:{role}")
        first = last + 1
    return " ".join(found)
