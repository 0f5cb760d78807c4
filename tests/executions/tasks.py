"""Small tasks in Harbor format for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

HALVES = """
good=0
[ "$(cat a.txt 2>/dev/null)" = one ] && good=$((good + 1))
[ "$(cat b.txt 2>/dev/null)" = two ] && good=$((good + 1))
echo "{\\"reward\\": $((good / 2)).$((good % 2 * 5))}" > /logs/verifier/reward.json
"""
"""Half the score for a.txt with `one`, half for b.txt with `two`."""


def write_task(path: Path, verifier: str = HALVES, instruction: str = "Write a.txt and b.txt", verifier_timeout: float = 20.0) -> Path:
    """A task whose test.sh is `verifier`, run in the workspace; its environment holds given.txt."""
    for name in ("environment", "tests", "solution"):
        (path / name).mkdir(parents=True)
    (path / "task.toml").write_text(f'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = {verifier_timeout}\n')
    (path / "instruction.md").write_text(instruction + "\n")
    (path / "environment/given.txt").write_text("given\n")
    (path / "tests/test.sh").write_text(f"#!/bin/bash\n{verifier}\n")
    (path / "solution/solve.sh").write_text("echo one > a.txt; echo two > b.txt\n")
    return path
