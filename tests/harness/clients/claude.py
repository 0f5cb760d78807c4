"""What the tests of Claude Code share: its bench, its tools as a policy calls them, a task that is done."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.harness.clients.bench import FAULTS, Bench, Ran, bench
from tests.harness.clients.script import Reply, call

TASK = "Do what the tools tell you. [task-1]"
BOTH = pytest.mark.parametrize("stable", [True, False], ids=["stable", "plain"])
"""With the settings by which it changes as little as it can of what it sent (the default), and as it comes."""


def claude(
    folder: Path, renderer: TurnRenderer, stable: bool, tree: dict[str, dict[str, Any]] | None = None, faults: int = FAULTS
) -> AbstractAsyncContextManager[Bench]:
    sections = dict(tree or {})
    sections["harness"] = {**sections.get("harness", {}), "stable": stable}
    return bench(folder, renderer, "claude-code", sections, faults)


def bash(command: str) -> str:
    return call("Bash", command=command, description="Go on")


def add(text: object) -> str:
    """A tool call that adds a line to the file by which the task is judged."""
    return bash(f"echo {text} >> out.txt")


async def done(made: Bench, *replies: Reply | str) -> Ran:
    """Run the task with these replies in the main conversation, then "All done.": it ends well, and all was asked for."""
    made.script.on("main", "[task-1]", *replies, "All done.")
    ran = await made.run(TASK)
    assert ran.code == 0, ran.output
    assert ran.output.strip().endswith("All done."), ran.output
    return ran
