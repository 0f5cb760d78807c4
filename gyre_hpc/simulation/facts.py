"""What a plan is made from: how long executions take, what training and changes cost, and the batch; from a run's own log, or from options.

Read from a run: durations (`execution.end`); transfers, publications, checkpoints and optimizer steps (means); and the cost of
training, `train_seconds` of the steps (mean of a group). Runs of before that field: the lower quartile over steps of (node time in
training until the step's end) / (its groups), which contains waiting and so is an upper bound. `--train-node-hours` replaces either.

Durations of a run whose engines held fewer executions than ran contain what these waited for one another: other schedules are made from
`work`, which is without that (gyre_hpc/simulation/crowding.py); the run itself is simulated with its durations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cells.events import Mode, Schedule
from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.events import read_events
from gyre_hpc.layout import cell_capacities
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.summary import Summary, summarise
from gyre_hpc.simulation.crowding import Ended, slots_over_time, without_waiting
from gyre_hpc.simulation.scenario import Costs, most_served
from gyre_hpc.simulation.trouble import NO_TROUBLE, Trouble
from gyre_hpc.simulation.workload import Recorded, read_recorded
from gyre_hpc.viewing import see

DEFAULT_STEPS = 24
CROWDED = 0.01
"""Share of the durations below which waiting is none: the moments of a transfer in which a cell serves nowhere."""


@dataclass(frozen=True)
class Ran:
    """How a recorded run was cut and scheduled, and what it took: `seconds` from its first execution's start to its last step's end."""

    schedule: Schedule
    nodes_per_cell: int
    began: float
    """Clock at the start of the first execution."""
    seconds: float
    standalone_nodes: int = 0
    at_once: int | None = None
    """Executions that its supervisors run at once."""
    train_groups: tuple[float, ...] = ()
    """Node-seconds of training of each group, in the order of the workload's groups."""


@dataclass(frozen=True)
class Facts:
    """All that the search needs; seconds and nodes."""

    workload: Recorded
    groups_per_step: int
    group_size: int
    steps: int
    slots_per_node: float
    train_group: float
    smallest_cell: int
    """Nodes that hold the model in its training layout."""
    costs: Costs
    beta: float = 0.0
    origin: str = ""
    ran: Ran | None = None
    expected: Trouble = NO_TROUBLE
    staleness_bound: int | None = None
    """The run's `schedule.staleness_bound`, which every candidate keeps."""
    uncrowded: Recorded | None = None
    """The workload without what executions waited for one another, where that is known and not nothing."""
    assumed: frozenset[str] = frozenset()
    """Names of what neither the file nor an option told; of `costs` with `seconds_` before them."""
    given: frozenset[str] = frozenset()
    """Names of what options told."""

    @property
    def work(self) -> Recorded:
        """What other schedules are simulated with."""
        return self.uncrowded if self.uncrowded is not None else self.workload


@dataclass(frozen=True)
class Given:
    """What the command line says; None: take it from the run."""

    groups_per_step: int | None = None
    group_size: int | None = None
    steps: int | None = None
    slots_per_node: float | None = None
    train_node_hours: float | None = None
    """Of one step."""
    smallest_cell: int | None = None
    beta: float = 0.0
    group_spread: float | None = None
    """Sigma of log time in groups of sessions that were recorded once each."""


def gather(path: Path, given: Given) -> Facts:
    """From a run's directory or a file of durations, with what the options replace. Raises GyreError for what is missing."""
    paths = RunPaths(path)
    found: dict[str, Any] = {}
    workload_path = path
    costs, assumed = Costs(), {f"seconds_{name}" for name in vars(Costs()) if name != "kv"}
    if path.is_dir():
        if not paths.config.exists():
            raise ConfigError(f"{path} is a folder without config.yaml", "give a run's directory, or a file of durations")
        found, costs, assumed = _of_run(see(paths.config).config, list(read_events(paths.events)))
        workload_path = paths.events
    workload = read_recorded(workload_path)
    options = {
        name for name in ("groups_per_step", "group_size", "steps", "slots_per_node", "smallest_cell") if getattr(given, name) is not None
    }
    found |= {name: getattr(given, name) for name in options}
    for name, value in (("steps", DEFAULT_STEPS), ("smallest_cell", 1), ("group_size", 8)):
        if name not in found:
            found[name] = value
            assumed.add(name)
    (assumed if given.beta == 0.0 else options).add("beta")
    needed = {"groups_per_step": "--groups-per-step", "slots_per_node": "--slots-per-node"}
    missing = [option for name, option in needed.items() if name not in found]
    if given.train_node_hours is not None and "groups_per_step" in found:
        found["train_group"] = given.train_node_hours * 3600 / found["groups_per_step"]
        options.add("train_group_node_seconds")
    if "train_group" not in found:
        missing.append("--train-node-hours")
    if missing:
        raise ConfigError(f"{path} does not tell everything that a plan needs", f"give {', '.join(missing)}")
    crowd = found.pop("crowd", None)
    if crowd is not None:
        work = without_waiting(workload, *crowd)
        found["uncrowded"] = work if work.mean < (1 - CROWDED) * workload.mean else None
    if given.group_spread is not None:
        workload = replace(workload, spread=given.group_spread)
    (assumed if given.group_spread is None else options).add("group_spread")
    found |= {"assumed": frozenset(assumed), "given": frozenset(options)}
    return Facts(workload=workload, costs=costs, beta=given.beta, origin=str(path), **found)


def _of_run(config: Config, events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Costs, set[str]]:
    """Fields of `Facts`, what changes cost, and which of that the run does not tell."""
    summary = summarise(events)
    nodes = config.cells.nodes_per_cell
    found: dict[str, Any] = {
        "groups_per_step": config.schedule.groups_per_step,
        "group_size": config.schedule.group_size,
        "steps": config.run.steps,
        "slots_per_node": _held(config, events)[0][0] / nodes,
        "smallest_cell": nodes,
        "staleness_bound": config.schedule.staleness_bound,
    }
    told = _told(config, summary)
    works = training_of_groups(summary, nodes)
    if told:
        found["train_group"] = fmean(told.values())
    elif works:
        found["train_group"] = float(np.quantile(works, 0.25))
    if len(summary.steps) > 1 and len(summary.attempts) == 1:
        found["ran"] = _ran(config, summary, events, told)
    if len(summary.attempts) == 1:
        found["crowd"] = _crowd(config, summary, events)
    seen = {
        "seconds_to_training": any(t.to == "training" for t in summary.transfers),
        "seconds_to_rollout": any(t.to == "rollout" for t in summary.transfers),
        "seconds_publish": any(e["kind"] == "publish" for e in events),
        "seconds_close": bool(summary.steps),
        "seconds_grain": bool(told),
        "seconds_hand_over": False,  # what executions lose that change their engine is in their own durations
    }
    return found, _costs(config, summary, events), {name for name, is_seen in seen.items() if not is_seen}


def _crowd(config: Config, summary: Summary, events: Sequence[Mapping[str, Any]]) -> tuple[list[Ended], list[tuple[float, int]]] | None:
    """Its executions that ran, in the order of the log, and the slots that served; None for a run of no more than fit."""
    schedule = _schedule(config, events, 1)
    if config.harness.slots_per_node * _nodes(events) <= most_served(schedule):
        return None
    ended = [Ended(int(e["group"]), float(e["t"]), float(e["seconds"])) for e in events if e["kind"] == "execution.end"]
    slots = slots_over_time(summary.spans, summary.zero, schedule.capacity, schedule.standalone_capacity)
    return [end for end in ended if end.seconds > 0], slots


def _told(config: Config, summary: Summary) -> dict[int, float]:
    """Node-seconds of training of each trained group: its step's, in equal parts."""
    found: dict[int, float] = {}
    for step in summary.steps:
        if step.get("train_seconds"):
            share = float(step["train_seconds"]) / config.cells.ranks_per_node / len(step["groups"])
            found |= dict.fromkeys(map(int, step["groups"]), share)
    return found


def _costs(config: Config, summary: Summary, events: Sequence[Mapping[str, Any]]) -> Costs:
    """Means, not medians: what changes cost in all is what a run is longer by. Where no cell came back (async), the way back is taken to be
    as long beside the way there as in the defaults."""
    closed = [float(s["close_seconds"]) for s in summary.steps if "close_seconds" in s]
    seconds = {to: [t.seconds for t in summary.transfers if t.to == to] for to in ("training", "rollout")}
    to_training = fmean(seconds["training"] or [Costs.to_training])
    saved = [float(e["seconds"]) for e in events if e["kind"] == "checkpoint" and "seconds" in e]
    stepped = [float(s["step_seconds"]) for s in summary.steps if "step_seconds" in s]
    return Costs(
        close=fmean(closed) if closed else sum(saved) / max(1, len(summary.steps)) + fmean(stepped or [0.0]),
        to_training=to_training,
        to_rollout=fmean(seconds["rollout"] or [to_training * Costs.to_rollout / Costs.to_training]),
        publish=fmean([float(e["seconds"]) for e in events if e["kind"] == "publish"] or [0.0]),
        grain=_grain(config, summary),
    )


def _grain(config: Config, summary: Summary) -> float:
    """Seconds of one micro-step on its cell; 0 for runs that don't tell."""
    told = [step for step in summary.steps if step.get("train_seconds") and step.get("microsteps")]
    ranks = config.cells.nodes_per_cell * config.cells.ranks_per_node
    spent = sum(float(step["train_seconds"]) for step in told)
    return spent / ranks / sum(int(step["microsteps"]) for step in told) if told else 0.0


def _ran(config: Config, summary: Summary, events: Sequence[Mapping[str, Any]], told: Mapping[int, float]) -> Ran | None:
    ended = [event for event in events if event["kind"] == "execution.end" and float(event["seconds"]) > 0]
    if not ended:
        return None
    began = min(float(event["t"]) - float(event["seconds"]) for event in ended)
    mean = fmean(told.values()) if told else 0.0
    return Ran(
        schedule=_schedule(config, events, len(summary.steps)),
        nodes_per_cell=config.cells.nodes_per_cell,
        began=began,
        seconds=float(summary.steps[-1]["t"]) - began,
        standalone_nodes=config.cells.standalone,
        at_once=config.harness.slots_per_node * _nodes(events),
        train_groups=tuple(told.get(group, mean) for group in sorted({int(event["group"]) for event in ended})) if told else (),
    )


def _nodes(events: Sequence[Mapping[str, Any]]) -> int:
    """Of the allocation; each has a supervisor."""
    nodes = next((event["nodes"] for event in events if event["kind"] == "run.start" and "nodes" in event), ())
    return max(1, len(nodes))


def _held(config: Config, events: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], int]:
    """Executions that each cell holds, and the standalone pool: as the engines told at the start, else by the configuration."""
    told = next((event for event in events if event["kind"] == "engines"), None)
    if told is not None:
        return tuple(map(int, told["capacity"])), sum(map(int, told["standalone"]))
    held, count = cell_capacities(config), config.cells.count
    return tuple(held[:count]), sum(held[count:])


def _schedule(config: Config, events: Sequence[Mapping[str, Any]], steps: int) -> Schedule:
    """The rules of the run's own policy, up to the step that it has reached."""
    s = config.schedule
    capacity, standalone = _held(config, events)
    return Schedule(
        capacity,
        s.groups_per_step,
        s.group_size,
        s.phi,
        s.mu,
        steps,
        standalone_capacity=standalone,
        staleness_bound=s.staleness_bound,
        mode=Mode(s.mode),
        streaming=s.streaming,
        trainers=s.trainers,
        join_late=s.join_late,
    )


def training_of_groups(summary: Summary, nodes: int) -> list[float]:
    """Node-seconds in training for each group of each step: what cells of `nodes` nodes spent between two steps' ends."""
    works, before = [], 0.0
    for step in summary.steps:
        end = float(step["t"]) - summary.zero
        spent = sum(max(0.0, min(s.end, end) - max(s.start, before)) for s in summary.spans if s.state == "training")
        groups = len(step["groups"])
        if groups and spent > 0:
            works.append(spent * nodes / groups)
        before = end
    return works
