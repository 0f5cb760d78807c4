from __future__ import annotations

from pathlib import Path

from tests.cells.ranks import check_ranks


def test_ranks_that_compute_hear_and_acknowledge_what_is_settled(tmp_path: Path) -> None:
    check_ranks("../controller/mpi_hearing.py", 7, str(tmp_path))
