"""Which directory `model.path` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.model import model_directory


def test_a_directory_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_directory(check({"model": {"path": str(tmp_path)}}, "t")) == tmp_path.resolve()


def test_a_window_beyond_the_models_context_is_one_line_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    assert model_directory(check({"model": {"path": str(tmp_path), "window": 256}}, "t")) == tmp_path.resolve()
    with pytest.raises(ConfigError, match=r"model.window = 257 .*max_position_embeddings = 256"):
        model_directory(check({"model": {"path": str(tmp_path), "window": 257}}, "t"))


@pytest.mark.parametrize("name", ["missing", "empty", "builtin:nothing"])
def test_what_is_no_model_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    path = name if name.startswith("builtin") else str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"model.path = .*(does not exist|no readable|only built-in)"):
        model_directory(check({"model": {"path": path}}, "t"))
