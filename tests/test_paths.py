"""What a write that fails names."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gyre_hpc.paths import naming


@pytest.mark.parametrize(("known", "told"), [(None, "/run/report.html"), ("/run/other", "/run/other")])
def test_a_write_that_fails_names_its_file(known: str | None, told: str) -> None:
    with pytest.raises(OSError, match="No space") as caught, naming(Path("/run/report.html")):
        raise OSError(errno.ENOSPC, "No space left on device", known) if known else OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == told
