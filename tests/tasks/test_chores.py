"""The generator's promises: pure, never the same task twice, nothing that a demonstration showed, and a gate that holds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.policy.shell import Shell
from gyre_hpc.tasks.chores import HORIZON, KINDS, MAX_DIFFICULTY, NAMES, draw, draw_demonstrated

seeds = st.integers(0, 2**32)
indices = st.integers(0, HORIZON - 1)
difficulties = st.integers(1, MAX_DIFFICULTY)


@given(seeds, indices, difficulties)
def test_nothing_scores_0_and_the_reference_1(seed: int, index: int, difficulty: int) -> None:
    chore = draw(seed, index, difficulty)
    shell = Shell(chore.initial)
    assert len(chore.parts) == difficulty
    assert chore.score(shell.files) == 0.0
    for number, part in enumerate(chore.parts, 1):
        assert shell.call("bash", {"command": part.shell}) == "ok"
        assert chore.score(shell.files) == pytest.approx(number / difficulty)


@given(seeds, indices, difficulties)
def test_parts_share_no_file_and_lines_are_numbered(seed: int, index: int, difficulty: int) -> None:
    chore = draw(seed, index, difficulty)
    names = [name for part in chore.parts for name in part.names]
    assert len(names) == len(set(names))
    lines = chore.instruction.split("\n")
    assert [line.split(". ", 1)[0] for line in lines] == [str(n) for n in range(1, difficulty + 1)]


@given(seeds, indices, difficulties)
def test_pure(seed: int, index: int, difficulty: int) -> None:
    assert draw(seed, index, difficulty) == draw(seed, index, difficulty)


def test_no_task_of_a_seed_comes_twice() -> None:
    for seed in (0, 12345):
        firsts = {(p.kind, p.a, p.b) for p in (draw(seed, index, 1).parts[0] for index in range(HORIZON))}
        assert len(firsts) == HORIZON > 10_000


def test_no_part_of_a_task_was_demonstrated() -> None:
    rng = random.Random(1)
    shown = {(p.kind, p.a, p.b) for _ in range(4000) for p in draw_demonstrated(rng, 3).parts}
    asked = {(p.kind, p.a, p.b) for index in range(4000) for p in draw(0, index, 3).parts}
    assert len(shown) > 5000
    assert len(asked) > 5000
    assert not shown & asked


def test_seeds_differ() -> None:
    assert [draw(0, i, 2) for i in range(20)] != [draw(1, i, 2) for i in range(20)]


def test_every_kind_comes() -> None:
    assert {part.kind for index in range(200) for part in draw(0, index, 2).parts} == set(KINDS)


@pytest.mark.parametrize("difficulty", [0, -1, MAX_DIFFICULTY + 1])
def test_difficulty_out_of_range(difficulty: int) -> None:
    with pytest.raises(ValueError, match=f"difficulty {difficulty} is not in 1"):
        draw(0, 0, difficulty)


@given(seeds, indices, st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["10\n", "99\n", ""]), max_size=20))
def test_a_score_is_a_fraction_of_the_parts(seed: int, index: int, files: dict[str, str]) -> None:
    assert draw(seed, index, 3).score(files) * 3 == pytest.approx(round(draw(seed, index, 3).score(files) * 3))
