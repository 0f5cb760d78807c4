from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.runtime import VARIABLE, Address, Runtime, read_address, write_address

RUNTIME = Runtime(Path("/runs/one"), 3, "secret", "http://n1:8000", "/tmp/gateway.sock")


def test_what_the_driver_writes_every_process_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RUNTIME.write(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Runtime.read(path) == RUNTIME
    monkeypatch.setenv(VARIABLE, str(path))
    assert Runtime.from_environment() == RUNTIME
    assert [p.name for p in tmp_path.iterdir()] == ["runtime.json"]


def test_the_gateways_address_is_there_or_not(tmp_path: Path) -> None:
    assert read_address(tmp_path) is None
    address = Address("http://n1:8000", "/tmp/gateway.sock", 12)
    write_address(tmp_path, address)
    assert read_address(tmp_path) == address


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"run_dir": "x", "more": 1}'])
def test_a_file_that_is_not_ours_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runtime.json"
    path.write_text(text)
    with pytest.raises(GyreError, match=r"runtime file .*gyre run") as caught:
        Runtime.read(path)
    assert "\n" not in str(caught.value)


def test_outside_a_run_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(GyreError, match="GYRE_RUNTIME is not set"):
        Runtime.from_environment()
