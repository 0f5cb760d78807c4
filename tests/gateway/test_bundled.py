"""The bundled harness as a real process against the gateway: its compactions, sub-agents and retries branch the tree as they should."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre_hpc import harness
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import Bench, bench, serving, tool_call
from trees.records import Fate, Role

PROGRAM = Path(harness.__file__).parent / "main.py"


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


async def run(made: Bench, folder: Path, instruction: str, **settings: float) -> tuple[int, str]:
    """(exit code, stderr) of one harness on execution 0, in `folder`."""
    folder.mkdir()
    async with serving(made) as url:
        environment = {**os.environ, "ANTHROPIC_BASE_URL": f"{url}/x/s0", "GYRE_HARNESS": json.dumps(settings)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(PROGRAM), instruction, cwd=folder, env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode or 0, errors.decode()


async def test_sub_agent_and_compaction(made: Bench, tmp_path: Path) -> None:
    write = tool_call("write_file", path="a.txt", content="é 1.0\n")
    made.engine.replies += [
        *(tool_call("bash", command="echo sub"), "Did the last."),
        *("I write.\n" + write, "The first.", tool_call("bash", command="cat a.txt"), "Done."),
    ]
    code, errors = await run(made, tmp_path / "w", "Write a.\nSay sub.", sub_agent=1, compaction=1, seed=1)
    assert code == 0, errors
    assert (tmp_path / "w" / "a.txt").read_text() == "é 1.0\n"
    tree = made.tree()
    calls = list(tree.calls.values())
    roles = [Role.SUB_AGENT] * 2 + [Role.MAIN, Role.MAIN_SUMMARY, Role.MAIN, Role.MAIN]
    assert [call.role for call in calls] == roles
    assert [call.difference for call in calls] == ["sub-agent", "clean", "clean", "clean", "compaction", "clean"]
    assert sorted(tree.role_of(leaf) for leaf in tree.leaves) == [Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT]
    for call, spoken, asked in zip(calls, made.engine.said, made.engine.seen, strict=True):
        assert tree.tokens_of([call.sampled]).tolist() == spoken
        assert tree.tokens_of(tree.path(call.prompt)).tolist() == asked.prompt


async def test_every_call_retried(made: Bench, tmp_path: Path) -> None:
    """Each call is dropped once in mid-stream and repeated: delivered exactly once, whatever was cancelled is kept and no target."""
    turns = [tool_call("bash", command=f"echo {i}") for i in range(3)]
    made.engine.replies += [reply for turn in [*turns, "Done."] for reply in (turn, turn)]
    code, errors = await run(made, tmp_path / "w", "Do it.", retry=1, seed=2)
    assert code == 0, errors
    tree = made.tree()
    delivered = [call for call in tree.calls.values() if call.fate is Fate.DELIVERED]
    others = [call for call in tree.calls.values() if call.fate is not Fate.DELIVERED]
    assert {call.fate for call in others} <= {Fate.CANCELLED}
    assert not tree.incomplete
    assert all(call.difference in ("clean", "retry") for call in tree.calls.values())
    assert not any(tree.is_target(call.sampled) for call in others if call.sampled >= 0)
    asked = [tree.tokens_of(tree.path(call.prompt)).tolist() for call in delivered]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(asked))
