"""How far weights that a resume gave up are from those of now."""

from __future__ import annotations

import json

import numpy as np

from gyre_hpc.branches import Branch, Branches, counted, counted_all


def test_the_distance_goes_back_to_where_the_run_branched_off() -> None:
    """Versions 4 and 5 were given up at step 3: 5 is two updates before it, and one more with every step that follows."""
    assert [counted(version, 3) for version in (0, 3, 4, 5)] == [0, 3, 2, 1]
    assert [step - counted(5, 3) for step in (3, 4, 5)] == [2, 3, 4]
    assert counted(5, None) == 5
    assert counted(2, 0) == -2, "a run that begins again from nothing"
    versions = np.array([-1, 3, 4, 5], np.int32)
    assert counted_all(versions, 3).tolist() == [-1, 3, 2, 1]
    assert counted_all(versions, 3).dtype == np.int32
    assert counted_all(versions, None) is versions


def test_only_what_was_made_before_a_resume_is_of_its_branch() -> None:
    branches = Branches().resumed(Branch(3, groups=10, executions=40), 6)
    assert (branches.of_group(9, 5, [39]), branches.of_group(9, 3, [39]), branches.of_group(10, 5, [40])) == (1, 3, 5)
    assert (branches.of_execution(39), branches.of_execution(40)) == (3, None)
    again = branches.resumed(Branch(6, groups=20, executions=80), 7)
    assert [again.of_group(group, 8, [1]) for group in (9, 10, 19, 20)] == [-2, 4, 4, 8], "the earlier branch stays what it was"
    assert Branches.of(json.loads(json.dumps(again.saved()))).saved() == [[3, 10, 40], [6, 20, 80]]


def test_a_group_that_samples_anew_counts_from_the_resume() -> None:
    branches = Branches().resumed(Branch(3, groups=10, executions=40), 6)
    assert branches.of_group(9, 5, []) == 3
    assert branches.of_group(9, 5, [40, 41]) == 3, "all its executions were tried again after it"
    assert branches.of_group(9, 5, [39, 41]) == 1
    for step in (4, 6):
        assert branches.resumed(Branch(step, 20, 80), 6).of_group(9, 5, [41]) == 3, "and so it stays at the next resume"


def test_what_says_nothing_more_is_forgotten() -> None:
    branches = Branches().resumed(Branch(3, 10, 40), 6)
    assert branches.resumed(Branch(3, 20, 80), 7).saved() == [[3, 20, 80]], "further back, or the same place, and of more groups"
    assert branches.resumed(Branch(6, 20, 80), 10).saved() == [[6, 20, 80]], "all groups before it are consumed"
