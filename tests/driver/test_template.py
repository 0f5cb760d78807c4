"""What `gyre init` leaves where it can't write."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gyre_hpc.driver.template import write_template
from gyre_hpc.errors import ConfigError


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes the first bytes only, in place of a real one (that needs a mount)."""

    def half(path: Path, text: str) -> int:
        with open(path, "w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch)
    with pytest.raises(ConfigError, match=r"my\.yaml: No space left on device; free some space$"):
        write_template("my", tmp_path, force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_template("my", tmp_path, force=False)
    before = (tmp_path / "my.yaml").read_bytes()
    fill(monkeypatch)
    with pytest.raises(ConfigError, match="free some space"):
        write_template("my", tmp_path, force=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]
