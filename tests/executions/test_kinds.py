"""What each known client is told."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import get_args

import pytest

from gyre_hpc.config import HarnessSection
from gyre_hpc.executions.kinds import KINDS, Launch, Told

TOLD = Told("http://127.0.0.1:9747/x/s3cret", "s3cret", "policy", 5000, 700, 'Say "hi"\n')


def everything(launch: Launch) -> str:
    return json.dumps([list(launch.argv), dict(launch.env), dict(launch.files)])


def test_every_kind_of_the_configuration_is_known() -> None:
    assert {"bundled", *KINDS} == set(get_args(HarnessSection.model_fields["kind"].annotation))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "command"])
def test_each_is_told_the_task_and_where_the_gateway_is(name: str) -> None:
    launch = KINDS[name].launch(TOLD)
    assert TOLD.instruction in launch.argv
    assert TOLD.url in everything(launch)
    assert TOLD.secret in everything(launch)


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code", "opencode"])
def test_those_that_compact_are_told_the_window(name: str) -> None:
    assert "5000" in everything(KINDS[name].launch(TOLD))


def test_stable_settings_only_add() -> None:
    stable = KINDS["claude-code"].launch(TOLD).env
    plain = KINDS["claude-code"].launch(replace(TOLD, stable=False)).env
    assert plain.items() < stable.items()


def test_files_are_what_they_say() -> None:
    config = tomllib.loads(KINDS["codex"].launch(TOLD).files[".codex/config.toml"])
    assert config["model_providers"]["gyre"]["base_url"] == f"{TOLD.url}/v1"
    settings = json.loads(KINDS["opencode"].launch(TOLD).files[".config/opencode/opencode.json"])
    assert settings["provider"]["gyre"]["models"]["policy"]["limit"] == {"context": 5000, "output": 700}


def test_a_command_finds_all_three_families() -> None:
    assert {"ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"} <= KINDS["command"].launch(TOLD).env.keys()


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"claude-code"}))
def test_the_others_have_no_such_settings(name: str) -> None:
    """They run as they come either way, so what is shown of one way is shown of both."""
    assert KINDS[name].launch(TOLD) == KINDS[name].launch(replace(TOLD, stable=False))
