"""A task in Harbor format, read from its folder.

    task.toml           [agent] timeout_sec, [verifier] timeout_sec, [metadata]
    instruction.md      what the agent is told
    environment/        files of the workspace at the start (a Dockerfile there is left out: boxes are no containers)
    tests/test.sh       writes /logs/verifier/reward.json or reward.txt
    solution/solve.sh   the reference

Invariants: `load` reads and checks, it runs nothing and writes nothing; a folder that is no usable task is refused with one line that
names it, what is wrong and the remedy.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_hpc.errors import GyreError

AGENT_SECONDS = 900.0
VERIFIER_SECONDS = 900.0
_LONGEST = 7 * 24 * 3600.0


class TaskError(GyreError):
    """A folder that can't be used as a task."""


@dataclass(frozen=True)
class Task:
    """One task. Timeouts in seconds; `metadata` as the author wrote it."""

    path: Path
    instruction: str
    agent_timeout: float = AGENT_SECONDS
    verifier_timeout: float = VERIFIER_SECONDS
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def environment(self) -> Path:
        """Folder with the workspace's files at the start; need not exist."""
        return self.path / "environment"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path:
        return self.path / "solution"


def load(path: Path) -> Task:
    """Read the task in a folder. Raises TaskError."""
    settings = _settings(path)
    if "steps" in settings:
        raise TaskError(f"task {path}: [[steps]] makes it a multi-step task", "only tasks of a single step are supported; leave it out")
    if not (path / "tests" / "test.sh").is_file():
        raise TaskError(f"task {path}: tests/test.sh is missing", "add the verifier's script")
    return Task(
        path,
        _instruction(path),
        _seconds(path, settings, "agent", AGENT_SECONDS),
        _seconds(path, settings, "verifier", VERIFIER_SECONDS),
        _section(path, settings, "metadata"),
    )


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        with open(path / "task.toml", "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise TaskError(f"task {path}: task.toml is missing", "give a folder in Harbor format") from None
    except OSError as error:
        raise TaskError(f"task {path}: task.toml: {error.strerror}", "make it readable") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"task {path}: task.toml is not TOML: {error}", "mend the line that is named") from None


def _instruction(path: Path) -> str:
    try:
        text = (path / "instruction.md").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise TaskError(f"task {path}: instruction.md is missing", "add what the agent shall be told") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task {path}: instruction.md can't be read: {error}", "make it readable UTF-8") from None
    if not text or "\0" in text:
        raise TaskError(f"task {path}: instruction.md is empty or binary", "write what the agent shall be told")
    return text


def _section(path: Path, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise TaskError(f"task {path}: {name} in task.toml is no section", f"write [{name}]")
    return section


def _seconds(path: Path, settings: Mapping[str, Any], name: str, default: float) -> float:
    value = _section(path, settings, name).get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 < value <= _LONGEST:
        raise TaskError(f"task {path}: {name}.timeout_sec = {value!r}", f"give seconds, more than 0 and at most {_LONGEST:g}")
    return float(value)
