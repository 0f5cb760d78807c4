from __future__ import annotations

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.training.needs import device_bytes, require


@pytest.mark.parametrize(
    ("stage", "ranks", "core", "each"),
    [
        (1, 8, False, 8),
        (1, 8, True, 12 + 12 / 8),
        (2, 8, True, 10 + 14 / 8),
        (3, 8, False, 8 / 8),
        (3, 8, True, 20 / 8),
        (3, 1, True, 20),
    ],
)
def test_bytes_are_those_of_the_table_in_the_docs(stage: int, ranks: int, core: bool, each: float) -> None:
    assert device_bytes(1_000_000, ranks, stage, 2, core) == int(1_000_000 * each)


def test_a_model_that_never_fits_is_refused_with_both_numbers_and_what_would_hold_it() -> None:
    require(5_000_000_000, 8, 1, 2, True, 141_000_000_000)
    with pytest.raises(
        ConfigError,
        match=r"a rank of the core needs 432 GB .* 32\.0 billion parameters .*stage 1, 8 ranks.* has 141 GB; .*stage = 3 with 10 ranks",
    ):
        require(32_000_000_000, 8, 1, 2, True, 141_000_000_000)
    require(32_000_000_000, 10, 3, 2, True, 141_000_000_000)
