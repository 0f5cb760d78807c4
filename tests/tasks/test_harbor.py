"""Reading task folders: what is there is used, what is wrong is named."""

from pathlib import Path

import pytest

from gyre_hpc.tasks.harbor import AGENT_SECONDS, TaskError, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "some-task"
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "test.sh").write_text("#!/bin/bash\n")
    (path / "instruction.md").write_text("Do it.\n")
    (path / "task.toml").write_text(
        'version = "1.0"\n[metadata]\nauthor_name = "A"\n[verifier]\ntimeout_sec = 7.5\n[environment]\ncpus = 1\n'
    )
    return path


def test_load(folder: Path) -> None:
    task = load(folder)
    assert (task.name, task.instruction) == ("some-task", "Do it.")
    assert (task.agent_timeout, task.verifier_timeout) == (AGENT_SECONDS, 7.5)
    assert task.metadata["author_name"] == "A"
    assert task.tests == folder / "tests"
    assert task.environment == folder / "environment"
    assert task.solution == folder / "solution"


def toml(text: str):
    return lambda folder: (folder / "task.toml").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "task.toml").unlink(), "task.toml is missing"),
        (toml("a = "), "is not TOML"),
        (lambda f: (f / "task.toml").write_bytes(b"\xff\xfe"), "is not TOML"),
        (toml('[verifier]\ntimeout_sec = "long"'), "verifier.timeout_sec = 'long'; give seconds"),
        (toml("[agent]\ntimeout_sec = -1"), "agent.timeout_sec = -1"),
        (toml("[agent]\ntimeout_sec = nan"), "agent.timeout_sec = nan"),
        (toml("[agent]\ntimeout_sec = true"), "agent.timeout_sec = True"),
        (toml("agent = 3"), r"write \[agent\]"),
        (toml("[[steps]]\nname = 'one'"), "multi-step"),
        (lambda f: (f / "instruction.md").unlink(), "instruction.md is missing"),
        (lambda f: (f / "instruction.md").write_text(" \n"), "instruction.md is empty"),
        (lambda f: (f / "instruction.md").write_bytes(b"a\0b"), "empty or binary"),
        (lambda f: (f / "instruction.md").write_bytes(b"\xff"), "can't be read"),
        (lambda f: (f / "tests" / "test.sh").unlink(), "tests/test.sh is missing"),
    ],
)
def test_malformed(folder: Path, damage, message: str) -> None:
    damage(folder)
    with pytest.raises(TaskError, match=message) as caught:
        load(folder)
    assert str(folder) in caught.value.line
    assert "\n" not in caught.value.line
    assert caught.value.remedy
