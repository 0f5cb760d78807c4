"""Claude Code's own session files, as the real client writes them: what the gateway recorded token by token is in them as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.imports.importer import import_recording
from tests.harness.clients.claude import add, bash, claude, done
from tests.harness.clients.script import call
from trees.records import Role
from trees.store import StoreReader
from trees.tree import Tree
from trees.verify import verify

pytestmark = pytest.mark.harness


def texts(tree: Tree) -> list[tuple[Role, str]]:
    """(role, text) of each node in order; without a model, tokens are bytes."""
    return [(node.role, bytes(tree.tokens_of([node.node]).tolist()).decode()) for node in tree.nodes.values()]


async def test_a_session_with_a_sub_agent(tmp_path: Path, renderer: TurnRenderer) -> None:
    """It is copied out of the client's HOME by the policy's last call, so that call is the last that it has."""
    async with claude(tmp_path, renderer, True) as made:
        made.script.on("sub", "[sub-1]", "I begin.\n" + add("sub"), "The part is done.")
        task = call("Agent", description="Part", prompt="Do the part. [sub-1]", subagent_type="general-purpose")
        copied = bash("sleep 1; cp -r ~/.claude/projects sessions")
        ran = await done(made, "<think>Hm.</think>I look.\n" + add("one") + add("two"), task, copied)
        assert ran.file("out.txt").split() == ["one", "two", "sub"]
        recorded = made.exact(ran, ("clean", "sub-agent"))
    import_recording(ran.work / "sessions", tmp_path / "imported", None)
    assert verify(tmp_path / "imported") == []
    with StoreReader(tmp_path / "imported") as reader:
        assert reader.header is not None
        assert reader.header.provenance["token_exact"] is False
        (tree,) = (reader.tree(execution) for execution in reader.executions())
    told = texts(tree)
    assert len(tree.calls) == len(recorded.calls) - 1
    assert not any(tree.is_target(node) for node in tree.nodes)
    for role, words in (
        (Role.MAIN, ("[task-1]", "I look.", "echo one >> out.txt", "echo two >> out.txt", "Do the part.", "cp -r")),
        (Role.SUB_AGENT, ("[sub-1]", "I begin.", "echo sub >> out.txt", "The part is done.")),
    ):
        assert [word for word in words if not any(own is role and word in text for own, text in told)] == []
