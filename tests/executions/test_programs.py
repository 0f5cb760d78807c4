"""The harness as a program in a box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_hpc.config import HarnessSection
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.executions import sandbox
from gyre_hpc.executions.programs import SOCKET, Bundled
from gyre_hpc.harness import main


def test_every_setting_of_the_harness_is_given(tmp_path: Path) -> None:
    environment = Bundled(tmp_path, HarnessSection(retry=0.25)).environment("s3cret", 7, "policy")
    assert set(json.loads(environment["GYRE_HARNESS"])) == set(main.DEFAULTS)
    assert json.loads(environment["GYRE_HARNESS"])["retry"] == 0.25
    assert environment["ANTHROPIC_BASE_URL"].endswith("/x/s3cret")


def test_built_without_sources_and_mounted_read_only(tmp_path: Path) -> None:
    program = Bundled.build(tmp_path, HarnessSection(binds=["/opt/modules"]))
    assert {path.suffix for path in tmp_path.iterdir()} == {".pyc"}
    mounts = program.mounts(tmp_path / "g.sock")
    assert not any(mount.writable for mount in mounts)
    assert {mount.target for mount in mounts} >= {SOCKET, "/opt/modules"}


async def test_an_interpreter_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Bundled.build(tmp_path, HarnessSection())
    await program.check(tmp_path)
    monkeypatch.setattr(sandbox, "interpreter", lambda: "/opt/modules/bin/python3")
    with pytest.raises(GyreError, match=r"/opt/modules/bin/python3.*harness.binds"):
        await program.check(tmp_path)


async def test_a_bind_that_is_not_there_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    program = Bundled.build(tmp_path, HarnessSection(binds=["/usr", "/opt/no such folder"]))
    with pytest.raises(ConfigError, match=r"harness\.binds has /opt/no such folder"):
        await program.check(tmp_path)
