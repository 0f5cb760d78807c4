"""`gyre plan`: the answer of the search in words and JSON.

A cliff is a jump of the hours by more than CLIFF times the change in slots that it takes: a little more outstanding executions than slots
mean a second wave for the last few. (Where slots are short everywhere, hours go with them one to one: that is no cliff.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from gyre_hpc.simulation.facts import Facts
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.replay import replay
from gyre_hpc.simulation.search import Candidate, Tried, search, slopes
from gyre_hpc.simulation.trouble import NO_TROUBLE

CLIFF = 1.6


def plan(facts: Facts, nodes: int, staleness: float, seeds: int, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """What suits `nodes` nodes, with at most `staleness` updates on average; JSON-able."""
    found, searched = search(facts, nodes, staleness, seeds, tell)
    best = found[0]
    tell("the slots around the best one")
    around = slopes(best.candidate, facts, min(3, seeds))
    ran = _ran(facts)
    others = [t for t in found[1:] if t.candidate.shape != best.candidate.shape]
    modes: dict[str, dict[str, Any]] = {}
    for one in found:
        modes.setdefault(one.candidate.mode, one.as_dict())
    return {
        "origin": facts.origin,
        "nodes": nodes,
        "searched": searched,
        "seeds": len(best.outcomes),
        "steps": facts.steps,
        "staleness_limit": staleness,
        "ran": ran,
        "trouble": _troubled(best, facts),
        "best": best.as_dict(),
        "overrides": best.candidate.overrides(facts.smallest_cell),
        "runner_up": others[0].as_dict() if others else None,
        "modes": list(modes.values()),
        "slots": [{"scale": scale, "seconds": round(seconds, 1)} for scale, seconds in around],
        "cliff": _cliff(around),
        "given": sorted(facts.given),
        "assumed": sorted(facts.assumed),
        "facts": {
            "executions": facts.workload.executions,
            "mean_seconds": round(facts.workload.mean, 2),
            **({"mean_seconds_without_waiting": round(facts.work.mean, 2)} if facts.uncrowded is not None else {}),
            **({"group_spread": facts.workload.spread} if facts.workload.spread else {}),
            "skipped_groups": round(len(facts.workload.void) / len(facts.workload.groups), 4),
            "groups_per_step": facts.groups_per_step,
            "group_size": facts.group_size,
            "slots_per_node": facts.slots_per_node,
            "train_group_node_seconds": round(facts.train_group, 3),
            "smallest_cell": facts.smallest_cell,
            "beta": facts.beta,
            **{f"seconds_{name}": round(value, 3) for name, value in vars(facts.costs).items() if name != "kv"},
        },
    }


def _ran(facts: Facts) -> dict[str, float] | None:
    """The run itself, simulated with its own groups in their own order, beside what it took."""
    outcome = replay(facts)
    if outcome is None or facts.ran is None:
        return None
    seconds = outcome.steps[-1] - outcome.began
    return {
        "measured": round(facts.ran.seconds, 1),
        "simulated": round(seconds, 1),
        "error": round(seconds / facts.ran.seconds - 1, 4),
    }


def _troubled(best: Tried, facts: Facts) -> dict[str, Any] | None:
    """What the faults that the plan is made for cost its best one."""
    if not facts.expected.any:
        return None
    calm = best.candidate.scenario(replace(facts, expected=NO_TROUBLE), facts.steps)
    seconds = fmean(simulate(calm, seed).seconds for seed in range(len(best.outcomes)))
    kinds = {name: round(best.mean(name), 2) for name in ("faults", "deaths", "moved", "moved_bytes", "moved_seconds")}
    return {"what": facts.expected.words(), **kinds, "seconds_without": round(seconds, 1)}


def best_candidate(found: dict[str, Any]) -> Candidate:
    """The best one of what `plan` returned."""
    return Candidate(**{name: found["best"][name] for name in ("mode", "cells", "nodes_per_cell", "standalone", "phi", "mu")})


def _cliff(around: list[tuple[float, float]]) -> dict[str, float] | None:
    """The steepest step between two neighbours, if it is one."""
    jumps = [((a[1] / b[1] - 1) / (b[0] / a[0] - 1), a, b) for a, b in pairwise(around)]
    steepness, low, high = max(jumps)
    if steepness <= CLIFF:
        return None
    return {"from_scale": high[0], "to_scale": low[0], "longer": round(low[1] / high[1] - 1, 4), "steepness": round(steepness, 2)}


def render(found: dict[str, Any]) -> str:
    """The plan as text."""
    best, facts = found["best"], found["facts"]
    out = [
        f"{found['origin']}: {_count(facts['executions'], 'execution')} of {facts['mean_seconds']:g} s on average; "
        f"{_count(found['nodes'], 'node')}, {_count(found['searched'], 'candidate')}, {_count(found['steps'], 'step')}, "
        f"{_count(found['seeds'], 'seed')}",
        "",
        f"best: {_named(best)}",
        f"  {' '.join(found['overrides'])}",
        f"  {_time(best['seconds'])} ({_time(best['low'])} to {_time(best['high'])}), idle {best['idle']:.0%}, "
        f"staleness {best['staleness']:.2f} (limit {found['staleness_limit']:g})",
        f"  {best['over_bound']:.0%} above the bound without any idle time, {_time(best['bound_seconds'])}",
        f"  {_cliff_line(found['cliff'])}",
    ]
    if found["trouble"]:
        t = found["trouble"]
        out.append(f"  made for: {t['what']}: {_happened(t)}; without {_time(t['seconds_without'])}")
    if found["runner_up"]:
        other = found["runner_up"]
        out.append(f"runner-up: {_named(other)}: {_time(other['seconds'])}, {other['seconds'] / best['seconds'] - 1:+.1%}")
    if found["ran"]:
        ran = found["ran"]
        out += [
            "",
            f"the run itself: {_time(ran['measured'])} from its first execution to its last step, simulated {_time(ran['simulated'])}, "
            f"{ran['error']:+.0%}",
        ]
    out += ["", "the best of each mode"]
    for mode in found["modes"]:
        out.append(f"  {_time(mode['seconds']):>9}  {mode['seconds'] / best['seconds']:5.2f}x  idle {mode['idle']:4.0%}  {_named(mode)}")
    return "\n".join([*out, *_sources(found)])


def _sources(found: dict[str, Any]) -> list[str]:
    """Every number that the plan stands on, by where it is from."""
    numbers = found["facts"] | {"steps": found["steps"]}
    chosen = {*found["given"], *found["assumed"]}
    out = []
    for title, names in (
        (f"from {found['origin']}:", [name for name in numbers if name not in chosen]),
        ("from the options:", [name for name in numbers if name in found["given"]]),
        ("assumed, for neither tells:", [name for name in numbers if name in found["assumed"]]),
    ):
        out += ["", title, f"  {', '.join(f'{name} {numbers[name]:g}' for name in names)}"] if names else []
    return out


def _happened(trouble: dict[str, Any]) -> str:
    """What of it the best one had."""
    found = [f"{trouble['faults']:.1f} faults"] if trouble["faults"] or not (trouble["deaths"] or trouble["moved_seconds"]) else []
    if trouble["deaths"]:
        found.append(f"{trouble['deaths']:.1f} engines died")
    if trouble["moved_seconds"]:
        moved = f"{trouble['moved']:.0f} executions moved with {trouble['moved_bytes'] / 1e9:.3g} GB of KV"
        found.append(f"{moved}, {trouble['moved_seconds'] / max(1.0, trouble['moved']):.3g} s each")
    return ", ".join(found)


def _named(one: dict[str, Any]) -> str:
    pool = f" + {one['standalone']} standalone" if one["standalone"] else ""
    cells = (
        f"{one['cells']} cell{'s' if one['cells'] > 1 else ''} of {one['nodes_per_cell']} node{'s' if one['nodes_per_cell'] > 1 else ''}"
    )
    if one["mode"] == "async":
        cells, pool = f"{one['nodes_per_cell']} training", f" + {one['standalone']} rollout nodes"
    return f"{one['mode']}, {cells}{pool}, phi {one['phi']:g}, mu {one['mu']}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 7200 else f"{seconds:.0f} s"


def _cliff_line(cliff: dict[str, float] | None) -> str:
    if cliff is None:
        return "no cliff within 10 % of the slots"
    return f"a cliff: {cliff['to_scale']:g} times the slots take {cliff['longer']:.0%} longer than {cliff['from_scale']:g} times"
