"""A model in shards. What is collective runs in a program of its own (sharded_process.py), whose cases are the tests here."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from gyre_hpc.errors import ConfigError
from gyre_hpc.training.sharded import IDLE, _best_dimension, _pieces, _share, kept_apart
from tests.training.sharded_process import CASES


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [
        ((64, 3), 4, 0),
        ((61, 32), 2, 0),  # long: a row more or less is nothing
        ((4, 48, 24), 3, 1),  # four experts on three ranks
        ((8, 30, 32), 16, 2),
        ((256, 4096, 7168), 56, 0),  # a million pieces a rank along the last
        ((4, 5), 3, 0),  # nothing fits
        ((7,), 3, 0),
    ],
)
def test_a_parameter_is_cut_where_ranks_divide_it(shape: tuple[int, ...], ranks: int, dimension: int) -> None:
    assert _best_dimension(shape, ranks) == dimension


@pytest.mark.parametrize(("entries", "ranks"), [(6, 3), (7, 3), (1, 3), (61, 2), (2, 5), (0, 2)])
def test_pieces_are_those_of_torch_and_together_the_whole(entries: int, ranks: int) -> None:
    whole = torch.arange(2 * entries).view(entries, 2)
    pieces = _pieces(whole, ranks, 0)
    assert [len(piece) for piece in pieces] == [_share(entries, ranks, rank) for rank in range(ranks)]
    expected = [len(piece) for piece in torch.chunk(whole, ranks)] if entries else [0]
    assert [len(piece) for piece in pieces] == expected + [0] * (ranks - len(expected))
    assert torch.equal(torch.cat(pieces), whole)


def test_a_rank_without_rows_computes_a_batch_that_weighs_nothing() -> None:
    assert not IDLE.weight.any()
    assert not IDLE.tokens
    assert len(np.unique([len(IDLE.row), len(IDLE.position), len(IDLE.behaviour), len(IDLE.version)])) == 1
    assert IDLE.position.min() >= 1


def test_a_module_that_is_kept_in_another_dtype_is_gathered_in_that() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    names = [name for name, _ in model.named_parameters()]
    usual = dict.fromkeys(names, torch.bfloat16)
    assert kept_apart(model, usual, torch.bfloat16) == []
    assert kept_apart(model, {**usual, "0.weight": torch.float32}, torch.bfloat16) == [(model[0], torch.float32)]
    with pytest.raises(ConfigError, match=r"1\.0 has parameters of several dtypes: torch\.bfloat16, torch\.float32; .*stage = 1"):
        kept_apart(model, {**usual, "1.0.bias": torch.float32}, torch.bfloat16)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the program, which ends at the first case that fails."""
    command = [sys.executable, "-m", "tests.training.sharded_process", str(tmp_path_factory.mktemp("sharded"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(done.stderr[-8000:])
    return [line.removeprefix("passed ") for line in done.stdout.splitlines() if line.startswith("passed ")]


@pytest.mark.job
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", [" ".join([name, str(ranks), dtype, *training]) for name, ranks, dtype, _, training in CASES])
def test_a_cell_of_shards_computes_steps_resumes_and_publishes_like_the_whole(case: str, passed: list[str]) -> None:
    assert case in passed


@pytest.mark.job
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", ["served", "killed", "still"])
def test_a_rank_that_is_gone_is_not_waited_for_beyond_a_deadline(case: str, passed: list[str]) -> None:
    assert case in passed
