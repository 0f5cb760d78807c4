from __future__ import annotations

import pytest

from tests.cells.ranks import check_ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_announcements_over_real_ranks(ranks: int) -> None:
    check_ranks("mpi_channel.py", ranks)
