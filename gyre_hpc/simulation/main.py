"""What `gyre simulate` and `gyre plan` do: (JSON-able result, the same as text); pictures are written beside."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_hpc.errors import ConfigError
from gyre_hpc.simulation import plan as planning
from gyre_hpc.simulation import tables
from gyre_hpc.simulation.facts import Given, gather
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.paper import STUDIES
from gyre_hpc.simulation.picture import draw
from gyre_hpc.simulation.scenario import Scenario
from gyre_hpc.simulation.study import under
from gyre_hpc.simulation.trouble import NO_TROUBLE, Trouble

Tell = Callable[[str], None]


def run_study(name: str, seeds: int, pictures: Path | None, tell: Tell, expected: Trouble = NO_TROUBLE) -> tuple[dict[str, Any], str]:
    """The tables of one study; `pictures`: a folder for one Gantt chart a row; `expected`: faults that every row is in for, so that it
    is compared with none of the reported hours. Raises ConfigError for an unknown name."""
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, 1, 0.3)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no study {name}", f"{guess}there are: {', '.join(STUDIES)}")
    study = under(STUDIES[name](), expected)
    found = tables.study(study, seeds, tell)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for row in study.rows:
            _draw(row.scenario, pictures / f"{row.id}.svg")
    return found, tables.render(found)


def run_plan(
    path: Path,
    given: Given,
    nodes: int,
    staleness: float,
    seeds: int,
    picture: Path | None,
    tell: Tell,
    expected: Trouble = NO_TROUBLE,
) -> tuple[dict[str, Any], str]:
    """A plan for `nodes` nodes; `picture`: the file for a Gantt chart of the best one; `expected`: the faults it is made for."""
    if picture is not None and (picture.is_dir() or not picture.parent.is_dir()):  # not after minutes of search
        raise ConfigError(f"--picture {picture} can't be written", "give a file in a folder that exists")
    facts = replace(gather(path, given), expected=expected)
    found = planning.plan(facts, nodes, staleness, seeds, tell)
    if picture is not None:
        _draw(planning.best_candidate(found).scenario(facts, facts.steps), picture)
    return found, planning.render(found)


def _draw(scenario: Scenario, file: Path) -> None:
    file.write_text(draw(simulate(scenario, record=True), scenario.standalone_nodes))
