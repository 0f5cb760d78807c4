from __future__ import annotations

import pytest

from tests.cells.ranks import check_ranks


@pytest.mark.job
@pytest.mark.parametrize("width", [1, 2])
def test_a_step_is_summed_over_the_prefix_and_inside_the_core(width: int) -> None:
    check_ranks("../controller/mpi_sums.py", 1 + 2 * width, str(width))
