"""The keys of a configuration: complete, frozen, and a wrong value is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gyre_hpc.config import Config, valid_keys
from gyre_hpc.configfile import load
from gyre_hpc.errors import ConfigError


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_configuration_can_not_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "override", ["run.steps=true", "training.lr=true", "gateway.port=false", "schedule.staleness_bound=true", "run.name=true"]
)
def test_true_is_no_number(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="not true or false"):
        load(write(tmp_path, ""), [override])


@pytest.mark.parametrize("key", ["deadlines.idle", "harness.tool_timeout", "gateway.ping", "verifier.timeout"])
def test_never_is_a_number_of_seconds_that_a_socket_takes(tmp_path: Path, key: str) -> None:
    load(write(tmp_path, ""), [f"{key}=1e9"])
    with pytest.raises(ConfigError, match=rf"{key} = .*at most 1e9 seconds, which is never"):
        load(write(tmp_path, ""), [f"{key}=1e10"])


@pytest.mark.parametrize("name", ["", "A=B"])
def test_a_variable_has_a_name_that_an_environment_takes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"harness\.env = .*; '{name}' is no name of a variable"):
        load(write(tmp_path, ""), [f"harness.env={{'{name}': x}}"])


@pytest.mark.parametrize("host", ["''", "'::1'", "http://n1", "n1:80", "'n 1'"])
def test_a_host_stands_in_a_url(tmp_path: Path, host: str) -> None:
    for good in ("127.0.0.1", "localhost", "node-01.cluster_a", "0.0.0.0"):
        load(write(tmp_path, ""), [f"gateway.host={good}"])
    with pytest.raises(ConfigError, match=r"gateway\.host = .*; a host's name or IPv4 address is wanted, without a port$"):
        load(write(tmp_path, ""), [f"gateway.host={host}"])


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", '"a\\nb"'])
def test_a_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name = .* run\.dir says where a run lives$"):
        load(write(tmp_path, ""), [f"run.name={name}"])


def test_a_name_may_be_in_any_script(tmp_path: Path) -> None:
    assert str(load(write(tmp_path, ""), ["run.name=lauf-ü,lr=0.1 日本"]).run_dir) == "runs/lauf-ü,lr=0.1 日本"


def test_every_shipped_configuration_is_valid() -> None:
    shipped = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
    assert {path.name for path in shipped} >= {"quickstart.yaml", "quickstart-vllm.yaml", "sweep.yaml"}
    for path in shipped:
        load(path)


def test_valid_keys_are_dotted_and_complete() -> None:
    keys = set(valid_keys())
    assert {"run.steps", "training.lr", "sweep.grid"} <= keys
    assert "run" not in keys
