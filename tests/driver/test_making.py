"""The child that makes the built-in model says why it could not, in one line of the attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.driver import making
from gyre_hpc.driver.children import MARK
from gyre_hpc.failure import first_failure
from gyre_hpc.policy import recipe


def test_a_cache_that_can_not_be_made_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv(MARK, str(tmp_path))
    assert making.main() == 1
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.error().line.startswith(f"model: the small model can't be kept in {tmp_path}/file/cache: ")
    assert failure.error().line.endswith("; free some space there or set GYRE_CACHE to another folder")
    assert capsys.readouterr().out == ""


def test_a_mistake_of_ours_has_a_traceback_and_a_cached_model_is_all_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(recipe, "ensure", lambda _: None)
    assert making.main() == 0
    assert first_failure(tmp_path) is None

    def broken(_: object) -> None:
        raise KeyError("layer")

    monkeypatch.setattr(recipe, "ensure", broken)
    assert making.main() == 75
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.what == "KeyError: 'layer'"
    assert "Traceback" in capsys.readouterr().err
