from __future__ import annotations

import numpy as np
import pytest

from cells import reduce


def test_buffers_are_cut_into_views_that_cover_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "PIECE", 4)
    buffer = np.arange(10, dtype=np.float32)
    pieces = reduce._pieces(buffer)
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    pieces[2][1] = -1.0
    assert buffer[9] == -1.0
    assert reduce._pieces(np.zeros(0, np.float32)) == []


@pytest.mark.parametrize("buffer", [np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_other_buffers_are_refused(buffer: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        reduce._pieces(buffer)
