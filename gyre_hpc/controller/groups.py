"""What the controller knows of the groups: a mirror of the gateway's ledger, fed by its changes.

Ordering key: the ledger's change sequence. Invariants: an index of a group has at most one outcome; a group is complete when the
ledger says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cells.events import Event, ExecutionFinished, GroupComplete, GroupFrontier
from gyre_hpc.branches import Branches
from gyre_hpc.controller.plan import Outcome


@dataclass
class GroupState:
    """One group as the ledger tells it; `outcomes` by index of the group; `counts_as`: its version, for distances (branches.py)."""

    group: int
    task: str
    size: int
    version: int
    counts_as: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    valid: int | None = None


class Groups:
    """All groups that are not consumed yet."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupState] = {}
        self.next_group = 0

    def __getitem__(self, group: int) -> GroupState:
        return self._groups[group]

    def restore(self, ledger: Mapping[str, Any], first: int = 0, branches: Branches | None = None) -> list[GroupFrontier]:
        """Read the ledger's frontier, from group `first` on, after a (re)start; returns it in the policy's terms."""
        branches = branches if branches is not None else Branches()
        frontier = []
        self.next_group = first
        for entry in ledger["groups"]:
            counts_as = branches.of_group(entry["group"], entry["version"], [end["execution"] for end in entry["ends"]])
            state = GroupState(entry["group"], entry["task"], entry["size"], entry["version"], counts_as, valid=entry["valid"])
            for end in entry["ends"]:
                state.outcomes[end["index"]] = Outcome(end["execution"], end["score"], end["valid"])
            self._groups[state.group] = state
            self.next_group = max(self.next_group, state.group + 1)
            frontier.append(GroupFrontier(state.group, counts_as, state.size, len(state.outcomes), state.valid))
        return frontier

    def dispatched(self, group: int, task: str, size: int, version: int) -> None:
        self._groups[group] = GroupState(group, task, size, version, version)
        self.next_group = max(self.next_group, group + 1)

    def on_change(self, change: Mapping[str, Any]) -> list[Event]:
        """Take one change of the ledger; returns what the policy must hear of it."""
        state = self._groups.get(change.get("group", -1))
        if state is None:
            return []
        if change["kind"] == "ended":
            if change["index"] in state.outcomes:
                return []
            state.outcomes[change["index"]] = Outcome(change["execution"], change["score"], change["valid"])
            return [ExecutionFinished(state.group)]
        if change["kind"] == "complete" and state.valid is None:
            state.valid = change["valid"]
            return [GroupComplete(state.group, change["valid"])]
        return []

    def forget(self, group: int) -> None:
        """The group was trained on."""
        self._groups.pop(group, None)
