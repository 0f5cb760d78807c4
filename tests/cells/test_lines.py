from __future__ import annotations

import pytest

from tests.cells.ranks import check_ranks


@pytest.mark.job
@pytest.mark.parametrize("ranks", [2, 4])
def test_questions_answers_and_notes_over_real_ranks(ranks: int) -> None:
    check_ranks("mpi_lines.py", ranks)
