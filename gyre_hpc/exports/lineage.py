"""Which weights a version number means, in a run whose resumes gave up steps.

A resume from step S counts S + 1, S + 2, ... again, for other weights (gyre_hpc/branches.py); what the old ones sampled stays in the trees
under the old numbers. So an export says of each execution and of each group's dispatch its `lineage`, the number of such resumes before it,
and its `fork`: versions above it are of weights that a later resume gave up (None: there are none). Within one lineage a number means one
thing; up to the fork it means the same in the later ones. Source: `steps.again` in the run's events; trees without their run have one
lineage. Ordering key: ids of executions and groups, as in branches.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_hpc.branches import Branch
from gyre_hpc.events import read_events

FIELDS = ("lineage", "fork", "group_lineage", "group_fork")


class Lineages:
    """Of one run; `forks`: its resumes that gave up steps, in their order."""

    def __init__(self, forks: Iterable[Branch] = ()) -> None:
        self._forks = tuple(forks)

    @classmethod
    def of(cls, folder: Path) -> Lineages:
        """Of a run's directory, or of its folder `trees`."""
        events = next((file for file in (folder / "events.jsonl", folder.parent / "events.jsonl") if file.is_file()), None)
        again = (event for event in read_events(events) if event["kind"] == "steps.again") if events is not None else ()
        return cls(Branch(int(e["step"]), int(e["first_group"]), int(e["first_execution"])) for e in again)

    def facts(self, group: int, execution: int) -> dict[str, int | None]:
        """`FIELDS` of an execution."""
        own = [fork.step for fork in self._forks if execution < fork.executions]
        its = [fork.step for fork in self._forks if group < fork.groups]
        total = len(self._forks)
        return {
            "lineage": total - len(own),
            "fork": min(own, default=None),
            "group_lineage": total - len(its),
            "group_fork": min(its, default=None),
        }

    def told(self, whole: dict[str, Any]) -> dict[str, Any]:
        """An execution as trees/export.py has it, with its facts in front of nodes and calls."""
        lists: dict[str, Any] = {name: whole.pop(name) for name in ("nodes", "calls") if name in whole}
        return {**whole, **self.facts(whole["group"], whole["execution"]), **lists}
