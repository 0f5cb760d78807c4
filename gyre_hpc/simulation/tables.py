"""The tables of `gyre simulate`: every row under all seeds, beside what was reported.

`low` and `high` are the 5th and 95th percentile over seeds: what one run may take. All rows of a table run the same executions under a
seed (gyre_hpc/simulation/workload.py), so differences between rows are sharper than these ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.outcome import Outcome
from gyre_hpc.simulation.scenario import HOUR
from gyre_hpc.simulation.study import Ratio, Row, Study

TUNING_SEEDS = 3
"""Seeds with which candidates are compared before the best one gets all of them."""


@dataclass(frozen=True)
class Measured:
    """One row over all seeds; hours."""

    row: Row
    outcomes: tuple[Outcome, ...]
    calm: tuple[Outcome, ...] = ()
    """Under the same seeds without faults; empty where there are none."""

    @property
    def hours(self) -> list[float]:
        return [outcome.seconds / HOUR for outcome in self.outcomes]

    @property
    def mean(self) -> float:
        return fmean(self.hours)

    @property
    def error(self) -> float | None:
        """Relative to what was reported."""
        return None if self.row.reported is None else self.mean / self.row.reported - 1

    def share(self, name: str) -> float:
        """The mean of one of the outcome's numbers."""
        return fmean(getattr(outcome, name) for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        low, high = spread(self.hours)
        return {
            "id": self.row.id,
            "what": self.row.what,
            "phi": self.row.scenario.schedule.phi,
            "mu": self.row.scenario.schedule.mu,
            "reported_hours": self.row.reported,
            "simulated_hours": round(self.mean, 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "error": None if self.error is None else round(self.error, 4),
            "fitted": self.row.fitted,
            "idle": round(self.share("idle"), 4),
            "staleness": round(self.share("staleness"), 3),
            "bound_hours": round(self.share("bound") / HOUR, 3),
            "execution_hours": round(self.share("execution_mean") / HOUR, 3),
            "query_hours": round(self.share("query_mean") / HOUR, 3),
            "faults": round(self.share("faults"), 2),
            "deaths": round(self.share("deaths"), 2),
            "moved": round(self.share("moved"), 1),
            "moved_bytes": round(self.share("moved_bytes")),
            "moved_hours": round(self.share("moved_seconds") / HOUR, 3),
            "calm_hours": round(fmean(outcome.seconds for outcome in self.calm) / HOUR, 3) if self.calm else None,
        }


def spread(values: Sequence[float]) -> tuple[float, float]:
    """(5th, 95th percentile)."""
    low, high = np.percentile(values, (5, 95))
    return float(low), float(high)


def measure(row: Row, seeds: int) -> Measured:
    """A row under seeds 0 .. seeds - 1."""
    calm = tuple(simulate(row.calm, seed) for seed in range(seeds)) if row.calm is not None else ()
    return Measured(row, tuple(simulate(row.scenario, seed) for seed in range(seeds)), calm)


def study(found: Study, seeds: int, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """All tables of a study as JSON-able data; `tell` hears what is worked on."""
    rows = []
    for row in found.rows:
        tell(f"{row.id}: {row.what}")
        rows.append(measure(row, seeds))
    errors = [row.error for row in rows if row.error is not None]
    tell("ratios")
    ratios = _ratios(found.ratios, seeds)
    tell("the best Async + streaming")
    tuned = _best(found.tuned, seeds)
    tell("the sweep over slot load")
    sweep = [_swept(*point, seeds) for point in found.sweep]
    return {
        "name": found.name,
        "title": found.title,
        "seeds": seeds,
        "rows": [row.as_dict() for row in rows],
        "rms": _rms(errors),
        "rms_predicted": _rms([row.error for row in rows if row.error is not None and not row.row.fitted]),
        "ratios": ratios,
        "tuned": tuned.as_dict(),
        "sweep": sweep,
        "parameters": [vars(parameter) for parameter in found.parameters],
        "notes": list(found.notes),
    }


def _rms(errors: Sequence[float]) -> float | None:
    return round(math.sqrt(fmean(error**2 for error in errors)), 4) if errors else None


def _ratios(ratios: Sequence[Ratio], seeds: int) -> list[dict[str, Any]]:
    measured: dict[str, Measured] = {}
    out = []
    for ratio in ratios:
        for row in (ratio.over, ratio.under):
            if row.id not in measured:
                measured[row.id] = measure(row, seeds)
        over, under = measured[ratio.over.id], measured[ratio.under.id]
        low, high = spread([a / b for a, b in zip(over.hours, under.hours, strict=True)])
        value = over.mean / under.mean
        out.append(
            {
                "id": ratio.id,
                "how": ratio.how,
                "reported_low": ratio.low,
                "reported_high": ratio.high,
                "simulated": round(value, 3),
                "low": round(low, 3),
                "high": round(high, 3),
                "inside": ratio.low <= value <= ratio.high,
            }
        )
    return out


def _best(candidates: Sequence[Row], seeds: int) -> Measured:
    few = [measure(row, min(seeds, TUNING_SEEDS)) for row in candidates]
    return measure(min(few, key=lambda m: m.mean).row, seeds)


def _swept(name: str, load: float, row: Row, base: Row, seeds: int) -> dict[str, Any]:
    over, under = measure(row, seeds), measure(base, seeds)
    low, high = spread([a / b for a, b in zip(over.hours, under.hours, strict=True)])
    return {
        "parameters": name,
        "slot_load": load,
        "colocate_hours": round(over.mean, 2),
        "elastic_hours": round(under.mean, 2),
        "ratio": round(over.mean / under.mean, 3),
        "low": round(low, 3),
        "high": round(high, 3),
    }


def render(found: dict[str, Any]) -> str:
    """The tables as text."""
    over = f"{found['seeds']} seeds, ranges are the 5th to 95th percentile over them" if found["seeds"] > 1 else "one seed, so no ranges"
    out = [f"{found['title']}; hours; {over}", ""]
    troubled = found["tuned"]["calm_hours"] is not None
    first, last = ("without", "faults") if troubled else ("reported", "error")
    out.append(f"id   {first:>8}  simulated  range            {last:<6}  idle  stale  how        configuration")
    for row in found["rows"]:
        how = "fitted" if row["fitted"] else "predicted"
        out.append(_line(row, how))
    out.append(_line(found["tuned"], "best found"))
    if any(row["moved_bytes"] or row["moved_hours"] or row["deaths"] for row in found["rows"]):
        out += ["", "id    moved  TB of KV  execution hours waited  engines died", *map(_moved_line, found["rows"])]
    if found["rms"] is not None:
        predicted = f"; of the predicted rows {found['rms_predicted']:.2%}" if found["rms_predicted"] is not None else ""
        out += ["", f"rms error {found['rms']:.2%}{predicted}"]
    elif troubled:
        out += ["", "without: hours without any of this"]
    else:
        out.append("")
    out += [_ratio_line(ratio) for ratio in found["ratios"]]
    if found["sweep"]:
        out += ["", "parameters  slot load  colocate h  elastic h  colocate : elastic  range"]
        out += [
            f"{s['parameters']:<10}  {s['slot_load']:9.2f}  {s['colocate_hours']:10.1f}  {s['elastic_hours']:9.1f}  "
            f"{s['ratio']:18.3f}  {s['low']:.3f} to {s['high']:.3f}"
            for s in found["sweep"]
        ]
    out += ["", "parameters (no reported hours enter a simulated row but through those that are called fitted)"]
    width = max((len(p["name"]) for p in found["parameters"]), default=0)
    out += [f"  {p['name']:<{width}} {p['value']:<6g} {p['unit']:<12} {p['source']}" for p in found["parameters"]]
    out += ["", *(f"* {note}" for note in found["notes"])]
    return "\n".join(out)


def _line(row: dict[str, Any], how: str) -> str:
    """With faults, the hours without them and the mean number of faults stand where the reported hours and the error do."""
    troubled = row["calm_hours"] is not None
    known = row["calm_hours"] if troubled else row["reported_hours"]
    reported = f"{known:8.2f}" if known is not None else " " * 8
    error = f"{row['faults']:6.1f}" if troubled else f"{row['error']:+6.1%}" if row["error"] is not None else " " * 6
    numbers = f"{reported}  {row['simulated_hours']:9.2f}  {row['low']:6.2f} to {row['high']:6.2f}  {error}"
    numbers += f"  {row['idle']:4.0%}  {row['staleness']:5.2f}"
    name = row["id"] if len(row["id"]) <= 4 else "A3*"
    burst = "" if "phi" in row["what"] else f", phi {row['phi']:g}, mu {row['mu']}"
    return f"{name:<4} {numbers}  {how:<10} {row['what']}{burst}"


def _moved_line(row: dict[str, Any]) -> str:
    """Executions that changed their engine, the KV that went with them, and what they waited for that, all together."""
    return f"{row['id']:<4} {row['moved']:6.0f}  {row['moved_bytes'] / 1e12:8.2f}  {row['moved_hours']:22.1f}  {row['deaths']:12.1f}"


def _ratio_line(ratio: dict[str, Any]) -> str:
    verdict = "inside" if ratio["inside"] else "OUTSIDE"
    return (
        f"{ratio['id']} ({ratio['how']}): {ratio['simulated']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}); "
        f"reported {ratio['reported_low']:.2f} to {ratio['reported_high']:.2f}: {verdict}"
    )
