"""`gyre simulate` and `gyre plan`: runs in a model; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre_hpc.commands.options import JsonOption, TroubleOptions, check_numbers, unfolded
from gyre_hpc.commands.places import warn_of_version
from gyre_hpc.commands.terminal import Progress, show

_NO_TROUBLE = TroubleOptions()


@unfolded
def simulate(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="paper-122b, paper-24-nodes or paper-2.4t.")],
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of every row.")] = 20,
    picture: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a Gantt chart of every row there, as SVG.")] = None,
    expected: TroubleOptions = _NO_TROUBLE,
    as_json: JsonOption = False,
) -> None:
    """Simulate the paper's experiments with the scheduler of this system; reported numbers beside simulated ones."""
    from gyre_hpc.simulation.main import run_study

    found, text = run_study(study, seeds, picture, Progress(), expected.trouble())
    show(found, as_json, lambda _: text)


@unfolded
def plan(
    path: Annotated[Path, typer.Argument(metavar="TRACE_OR_RUN", help="A run, or JSON lines with group and seconds of executions.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to plan for.")],
    staleness: Annotated[float, typer.Option(min=0.0, help="Mean staleness allowed, updates.")] = 1.5,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of every finalist.")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps (the run's, or 24).")] = None,
    groups_per_step: Annotated[int | None, typer.Option(min=1, help="Groups of a step (the run's).")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Executions of a group (the run's, or 8).")] = None,
    slots_per_node: Annotated[float | None, typer.Option(min=0.01, help="Executions that one node's engines hold (the run's).")] = None,
    train_node_hours: Annotated[float | None, typer.Option(min=0.0, help="Training of one step (estimated from a run).")] = None,
    smallest_cell: Annotated[int | None, typer.Option(min=1, help="Nodes that hold the model in training (the run's, or 1).")] = None,
    beta: Annotated[float, typer.Option(min=0.0, help="Speed of an execution at a share u of slots in use: 1 / (1 + beta u).")] = 0.0,
    group_spread: Annotated[float | None, typer.Option(min=0.0, help="Sigma of log time in a group, for sessions (0.26).")] = None,
    expected: TroubleOptions = _NO_TROUBLE,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Gantt chart of the best one, as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the cells, mode, mu, phi and standalone pool that suit a workload; in the simulator, nothing is run."""
    from gyre_hpc.simulation.facts import Given
    from gyre_hpc.simulation.main import run_plan

    check_numbers(
        staleness=staleness, slots_per_node=slots_per_node, train_node_hours=train_node_hours, beta=beta, group_spread=group_spread
    )
    given = Given(groups_per_step, group_size, steps, slots_per_node, train_node_hours, smallest_cell, beta, group_spread)
    trouble = expected.trouble()
    warn_of_version(path)
    found, text = run_plan(path, given, nodes, staleness, seeds, picture, Progress(), trouble)
    show(found, as_json, lambda _: text)
