"""The tables and pictures of benchmarks/policies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.policies_measure import Measured
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.summary import summarise
from gyre_hpc.simulation.picture import draw_run, draw_work

Found = Mapping[tuple[str, int], Measured]
"""By name of the policy and seed."""


def render(found: Found, cores_idle: Mapping[tuple[str, int], float], foretold: Mapping[tuple[str, int], float], row_seconds: float) -> str:
    """All as text; `foretold`: wall times as the simulator tells them from the elastic run alone."""
    names = list(dict.fromkeys(name for name, _ in found))
    seeds = sorted({seed for _, seed in found})
    some = next(iter(found.values()))
    out = [
        f"{len(seeds)} seeds, {len(some.outcome.steps)} steps, {len(some.idle_cells)} cells of one node on a virtual Slurm cluster",
        f"emulated device time: {row_seconds:g} s of its cell a trained row; emulated tool time: log-normal sleeps of the bundled harness",
        "",
        "wall time, seconds (simulated from the run's own durations, error)",
    ]
    for name in names:
        runs = [found[name, seed] for seed in seeds if (name, seed) in found]
        each = "   ".join(f"{m.wall:6.1f} ({m.simulated:6.1f}, {m.error:+5.1%})" for m in runs)
        out.append(f"  {name:18} {each}   mean {fmean(m.wall for m in runs):6.1f}, error {fmean(m.error for m in runs):+5.1%}")
    out += ["", *ratios(found, foretold, names, seeds), ""]
    out.append(
        "policy             staleness  execution  slowest/mean  training/step  transfers  score  idle (simulated)  cores idle  idle by cell"
    )
    for name in names:
        runs = [found[name, seed] for seed in seeds if (name, seed) in found]
        cores = fmean(cores_idle[name, seed] for seed in seeds if (name, seed) in found)
        cells = " ".join(f"{fmean(values):4.0%}" for values in zip(*(m.idle_cells for m in runs), strict=True))
        out.append(
            f"{name:18} {_mean(runs, 'staleness'):9.2f}  {_mean(runs, 'execution_mean'):7.2f} s  {_mean(runs, 'slowest'):12.2f}"
            f"  {_mean(runs, 'train_step'):11.1f} s  {_mean(runs, 'transfers'):9.0f}  {_mean(runs, 'score'):5.2f}"
            f"  {_mean(runs, 'idle'):5.0%} ({fmean(m.outcome.idle for m in runs):.0%})  {cores:15.0%}  {cells}"
        )
    return "\n".join(out)


def ratios(found: Found, foretold: Mapping[tuple[str, int], float], names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Wall time of each over that of elastic, of one seed each, measured and simulated."""
    if "elastic" not in names:
        return []
    out = ["wall time relative to elastic, by seed: mean (lowest to highest); simulated; simulated from the elastic run alone"]
    for name in names:
        both = [(found[name, seed], found["elastic", seed]) for seed in seeds if (name, seed) in found and ("elastic", seed) in found]
        if not both:
            continue
        real = [other.wall / elastic.wall for other, elastic in both]
        simulated = [other.simulated / elastic.simulated for other, elastic in both]
        told = [foretold[key] / foretold["elastic", key[1]] for key in foretold if key[0] == name]
        out.append(f"  {name:18} {fmean(real):.2f} ({min(real):.2f} to {max(real):.2f}); {fmean(simulated):.2f}; {fmean(told):.2f}")
    return out


def render_rows(found: Found, cores_idle: Mapping[tuple[str, int], float], row_seconds: float) -> str:
    """The paper's rows, one line a run: what it took, and what the simulator says of it from its own durations."""
    some = next(iter(found.values()))
    out = [
        f"{len(some.outcome.steps)} steps on eight nodes of a virtual Slurm cluster; emulated device time: {row_seconds:g} s of its node a "
        "trained row; emulated tool time: log-normal sleeps of the bundled harness",
        "",
        "row  seed   wall s  simulated s   error  staleness  transfers  idle (simulated)  pool idle  cores idle",
    ]
    for (name, seed), m in found.items():
        pool = f"{m.idle_pool:9.0%}" if m.idle_pool is not None else f"{'':9}"
        out.append(
            f"{name:3}  {seed:4}  {m.wall:7.1f}  {m.simulated:11.1f}  {m.error:+6.1%}  {m.staleness:9.2f}  {m.transfers:9}"
            f"  {m.idle:5.0%} ({m.outcome.idle:.0%})       {pool}  {cores_idle[name, seed]:10.0%}"
        )
    return "\n".join(out)


def as_dict(name: str, seed: int, m: Measured, cores_idle: float) -> dict[str, Any]:
    """One run's figures, JSON-able."""
    plain = {key: value for key, value in vars(m).items() if key not in ("run", "outcome")}
    return {"policy": name, "seed": seed, **plain, "error": m.error, "idle_simulated": m.outcome.idle, "cores_idle": cores_idle}


def draw_pictures(found: Mapping[str, Measured], folder: Path) -> None:
    """`real-NAME.svg` and `simulated-NAME.svg` of one run of each policy."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, m in found.items():
        summary = summarise(read_events(RunPaths(m.run).events))
        file = name.replace(" ", "-").replace("+", "-")
        (folder / f"real-{file}.svg").write_text(draw_run(summary, summary.zero, began=m.began))
        (folder / f"simulated-{file}.svg").write_text(draw_work(m.outcome, m.standalone))


def _mean(runs: Sequence[Measured], name: str) -> float:
    return fmean(getattr(m, name) for m in runs)
