"""The controller's mirror of the ledger."""

from __future__ import annotations

from cells.events import ExecutionFinished, GroupComplete, GroupFrontier
from gyre_hpc.branches import Branch, Branches
from gyre_hpc.controller.groups import Groups
from gyre_hpc.controller.plan import Outcome


def ended(index: int, score: float = 0.5, valid: bool = True) -> dict[str, object]:
    return {"kind": "ended", "group": 7, "execution": 100 + index, "index": index, "score": score, "valid": valid}


def test_a_group_is_followed_to_its_completion() -> None:
    groups = Groups()
    groups.dispatched(7, "tasks/7", 2, version=3)
    assert groups.next_group == 8
    assert groups.on_change(ended(1)) == [ExecutionFinished(7)]
    assert groups.on_change(ended(1)) == [], "told twice, counted once"
    assert groups.on_change(ended(0, 0.0, valid=False)) == [ExecutionFinished(7)]
    complete = {"kind": "complete", "group": 7, "valid": 1}
    assert groups.on_change(complete) == [GroupComplete(7, 1)]
    assert groups.on_change(complete) == []
    assert groups[7].outcomes == {1: Outcome(101, 0.5, True), 0: Outcome(100, 0.0, False)}


def test_changes_of_groups_that_are_gone_are_nobodys_business() -> None:
    groups = Groups()
    groups.dispatched(7, "tasks/7", 2, version=3)
    groups.forget(7)
    assert groups.on_change(ended(0)) == []
    assert groups.next_group == 8, "ids are never used again"


def test_a_restart_reads_the_frontier() -> None:
    groups = Groups()
    end = {"index": 0, "execution": 4, "score": 1.0, "valid": True}
    frontier = groups.restore(
        {
            "groups": [
                {"group": 2, "task": "a", "size": 1, "version": 1, "valid": 1, "ends": [end]},
                {"group": 5, "task": "b", "size": 2, "version": 2, "valid": None, "ends": []},
            ]
        }
    )
    assert frontier == [GroupFrontier(2, 1, 1, 1, 1), GroupFrontier(5, 2, 2, 0, None)]
    assert groups.next_group == 6
    assert groups[2].outcomes == {0: Outcome(4, 1.0, True)}


def test_groups_of_weights_that_were_given_up_count_from_where_the_run_branched_off() -> None:
    groups = Groups()
    entries = [
        {
            "group": group,
            "task": "a",
            "size": 1,
            "version": version,
            "valid": 1,
            "ends": [{"index": 0, "execution": 8, "score": 1.0, "valid": True}],
        }
        for group, version in ((4, 3), (5, 5))
    ]
    frontier = groups.restore({"groups": entries}, 4, Branches([Branch(3, 6, 9)]))
    assert [known.version for known in frontier] == [3, 1]
    groups.dispatched(6, "tasks/6", 1, 4)
    assert [(groups[group].version, groups[group].counts_as) for group in (4, 5, 6)] == [(3, 3), (5, 1), (4, 4)]
