"""Where the cells of a run are, and what they hold, in lines for people: from the events `run.start` and `engines`; pure.

Invariant: what an older log does not tell is left out, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = 8
"""Cells that are named one by one."""


def describe(start: Mapping[str, Any], engines: Mapping[str, Any]) -> list[str]:
    """A line for the cells, with their nodes, switches (several: the cell straddles them) and capacity; others for what else there is."""
    cells = start.get("cells")
    if not isinstance(cells, list) or not cells:
        return []
    held = engines.get("capacity") or []
    named = [
        _cell(number, nodes, start.get("switches") or [], held[number] if number < len(held) else None)
        for number, nodes in enumerate(cells[:SHOWN])
    ]
    more = f", {len(cells) - SHOWN} more" if len(cells) > SHOWN else ""
    lines = [f"nodes of the cells: {', '.join(named)}{more}{_straddling(start)}"]
    pool, idle = start.get("standalone") or [], start.get("idle") or []
    if pool:
        slots = sum(engines.get("standalone") or [])
        lines.append(f"standalone nodes: {_names(pool)}" + (f", holding {slots} executions" if slots else ""))
    if idle:
        lines.append(f"nodes that only run agents: {_names(idle)}")
    if engines.get("over"):
        lines.append(
            f"{engines['over']} engines hold fewer executions of a full window than rollout.capacity says: {_least(engines)}; "
            "longer contexts may be computed again"
        )
    return lines


def _cell(number: int, nodes: list[str], switches: list[list[str]], held: int | None) -> str:
    below = f" below {'+'.join(switches[number])}" if number < len(switches) and switches[number] else ""
    return f"{number} {'+'.join(dict.fromkeys(nodes))}{below}" + (f" ({held} executions)" if held is not None else "")


def _straddling(start: Mapping[str, Any]) -> str:
    switches = start.get("switches")
    if not switches:
        return ""
    wide = sum(len(names) > 1 for names in switches)
    what = "block" if start.get("topology") == "block" else "switch"
    return (
        f"; {wide} of {len(switches)} cells straddle {what}es" if what == "switch" else f"; {wide} of {len(switches)} cells straddle blocks"
    )


def _names(nodes: list[str]) -> str:
    shown = list(dict.fromkeys(nodes))
    return f"{', '.join(shown[:SHOWN])}" + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def _least(engines: Mapping[str, Any]) -> str:
    worst = min(engines["engines"], key=lambda engine: engine["holds"] - engine["capacity"])
    return (
        f"cell {worst['cell']} {worst['holds']} of {worst['capacity']} ({worst['kv_tokens']} tokens of KV, window {engines.get('window')})"
    )
