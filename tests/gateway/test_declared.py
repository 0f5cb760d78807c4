"""Key and weight version of a gateway alone: the same after a restart, readable by its user only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gyre_hpc.errors import GyreError
from gyre_hpc.gateway.declared import Declared


def test_secrets_and_version_are_the_same_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "gateway.state"
    first = Declared(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.declare(12)
    secrets = {first.secret(purpose) for purpose in ("api", "execution 1", "execution 11")}
    assert len(secrets) == 3
    assert all(len(secret) == 32 for secret in secrets)
    again = Declared(path)
    assert again.version == 12
    assert {again.secret(purpose) for purpose in ("api", "execution 1", "execution 11")} == secrets
    assert not any(secret in path.read_text() for secret in secrets)
    assert Declared(tmp_path / "other").secret("api") not in secrets


def test_a_server_that_tells_its_version_is_believed_until_one_is_declared(tmp_path: Path) -> None:
    declared = Declared(tmp_path / "gateway.state")
    declared.told(0, 5)
    declared.told(1, 4)
    assert (declared.version_of(0), declared.version_of(1), declared.version_of(2), declared.version) == (5, 4, 0, 4)
    declared.declare(6)
    assert (declared.version_of(0), declared.version) == (6, 6)


def test_a_state_that_is_not_ours_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.state"
    path.write_text('{"key": "zz"}')
    with pytest.raises(GyreError, match=r"gateway.state can't be read"):
        Declared(path)
