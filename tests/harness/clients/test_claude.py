"""Claude Code, as it comes from npm, in a box against the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.template import TurnRenderer
from tests.harness.clients.bench import bench
from tests.harness.clients.script import call
from trees.records import Role

pytestmark = pytest.mark.harness
TASK = "Write the numbers as the tools tell you. [task-1]"


@pytest.mark.parametrize("stable", [True, False])
async def test_many_tool_turns(tmp_path: Path, renderer: TurnRenderer, stable: bool) -> None:
    async with bench(tmp_path, renderer, "claude-code", {"harness": {"stable": stable}}) as made:
        turns = [f"Step {i}.\n" + call("Bash", command=f"echo {i} >> out.txt", description=f"Write {i}") for i in range(20)]
        made.script.on("main", "[task-1]", *turns, "All is written.")
        ran = await made.run(TASK)
        assert ran.code == 0, ran.output
        assert ran.output.strip().endswith("All is written.")
        assert ran.file("out.txt").split() == [str(i) for i in range(20)]
        made.exact(ran)
        assert set(made.roles(ran)["main"]) == {Role.MAIN}
