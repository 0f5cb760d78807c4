"""Imported sessions against a plain trie and against all token paths written out."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.errors import ConfigError
from gyre_hpc.imports import importer
from gyre_hpc.imports.importer import import_traces
from gyre_hpc.report.trees import statistics
from tests.imports.sessions import SIZE, Row, agent, calls, request, session, sessions, write
from trees.records import NodeKind, Role
from trees.selection import select_paths
from trees.store import StoreReader
from trees.tree import Tree
from trees.verify import verify

DOCUMENT = Path(__file__).parents[2] / "docs" / "file-formats.md"


def read(store: Path) -> list[Tree]:
    with StoreReader(store) as reader:
        return [reader.tree(execution) for execution in sorted(reader.executions())]


def one(tmp_path: Path, *requests: Row) -> Tree:
    import_traces(write(tmp_path / "t.jsonl", session(*requests)), tmp_path / "out")
    assert verify(tmp_path / "out") == []
    (tree,) = read(tmp_path / "out")
    return tree


def differences(tree: Tree) -> list[str]:
    return [call.difference for call in tree.calls.values()]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def trie(prompts: list[list[int]]) -> int:
    """The size of a trie: all different prefixes, counted."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@settings(max_examples=8, deadline=None)
@given(st.lists(sessions(), min_size=1, max_size=3), st.booleans())
def test_a_store_is_what_the_traces_say(rows: list[Row], seal_each: bool) -> None:
    rows = [{**row, "id": f"s{i}"} for i, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "SEAL_TOKENS", 1 if seal_each else 1 << 22)
        store = Path(folder) / "store"
        import_traces(write(Path(folder) / "t.jsonl", *rows), store)
        assert verify(store) == []
        found, trees = statistics(store), read(store)
    prompts = [[call["hash_ids"] for call in calls(row)] for row in rows]
    assert found["unique_blocks"] == sum(map(trie, prompts))
    assert found["expanded_blocks"] == sum(len(prompt) for one in prompts for prompt in one)
    assert found["segments"] == (len(rows) if seal_each else 1)
    paths = [path for tree, row in zip(trees, rows, strict=True) for path in check_session(tree, row)]
    assert found["stored_tokens"] == trie(paths)


def check_session(tree: Tree, row: Row) -> list[list[int]]:
    """One session; returns its paths, prompt and answer of every call, written out."""
    asked, made = calls(row), list(tree.calls.values())
    prompts = [tree.tokens_of(tree.path(call.prompt)).tolist() for call in made]
    assert [len(prompt) for prompt in prompts] == [call["in"] for call in asked]
    lengths = [tree.nodes[call.sampled].length if call.sampled >= 0 else 0 for call in made]
    assert lengths == [call["out"] for call in asked]
    assert [call.finish for call in made] == ["length" if call["stop"] == "max_tokens" else "stop" for call in asked]
    for i, first in enumerate(asked):
        for j, second in enumerate(asked[:i]):
            assert common(prompts[i], prompts[j]) // SIZE == common(first["hash_ids"], second["hash_ids"])
    # Every generated token is reached, and trained on in exactly one of all paths.
    drawn = [path.tokens[path.targets].size for path in select_paths(tree, 1000, 0)]
    assert sum(drawn) == sum(lengths) == sum(n.length for n in tree.nodes.values() if n.kind is NodeKind.SAMPLED)
    reached = {node for leaf in tree.leaves for node in tree.path(leaf)}
    assert reached == set(tree.nodes)
    return [*prompts, *(tree.tokens_of(tree.path(call.sampled)).tolist() for call in made if call.sampled >= 0)]


def test_answers_that_came_back_are_sampled_context(tmp_path: Path) -> None:
    tree = one(tmp_path, request([1, 2], 1, 3), request([1, 2, 3], 0, 5), request([1, 2, 3, 4, 5], 2, 1))
    kinds = [tree.nodes[node].kind for node in tree.path(tree.calls[2].sampled)]
    assert kinds == [NodeKind.CONTEXT, NodeKind.SAMPLED, NodeKind.SAMPLED, NodeKind.CONTEXT, NodeKind.SAMPLED]
    assert len(tree.leaves) == 1
    assert differences(tree) == ["clean", "clean", "clean"]


def test_an_answer_without_room_in_the_next_prompt_is_a_leaf(tmp_path: Path) -> None:
    tree = one(tmp_path, request([1], 1, 30), request([1, 2], 1, 2), request([1, 2, 3], 2, 2))
    assert sorted(tree.leaves) == sorted([tree.calls[0].sampled, tree.calls[2].sampled])
    assert differences(tree) == ["clean", "drift", "clean"]


def test_the_last_of_several_answers_to_one_prompt_came_back(tmp_path: Path) -> None:
    tree = one(tmp_path, request([1], 1, 3), request([1], 1, 2), request([1, 2, 3], 0, 1))
    assert tree.calls[0].prompt == tree.calls[1].prompt
    assert tree.calls[1].sampled in tree.path(tree.calls[2].prompt)
    assert tree.calls[0].sampled in tree.leaves
    assert differences(tree) == ["clean", "retry", "clean"]


def test_nothing_goes_on_from_an_answer_in_which_paths_fork(tmp_path: Path) -> None:
    """Block 3 is shared, block 4 is not: a store can't fork within what was sampled."""
    tree = one(tmp_path, request([1], 0, 8), request([1, 3, 4], 0, 1), request([1, 3, 5], 0, 1))
    assert tree.calls[0].sampled in tree.leaves
    assert differences(tree) == ["clean", "drift", "edit"]


def test_nothing_goes_on_from_an_answer_that_came_later(tmp_path: Path) -> None:
    tree = one(tmp_path, request([1, 2, 3], 0, 1), request([1], 1, 2))
    assert tree.calls[1].sampled in tree.leaves
    assert differences(tree) == ["clean", "compaction"]


def test_roles_and_side_queries(tmp_path: Path) -> None:
    tree = one(tmp_path, request([1, 2], 1, 3), agent(request([7], 1, 1), request([7, 8], 1, 1)), request([9], 0, 1))
    assert [call.role for call in tree.calls.values()] == [Role.MAIN, Role.SUB_AGENT, Role.SUB_AGENT, Role.MAIN]
    assert differences(tree) == ["clean", "sub-agent", "clean", "side-query"]


def test_no_cap_on_turns(tmp_path: Path) -> None:
    turns = 1500
    tree = one(tmp_path, *(request(list(range(1, n + 2)), 0, 2) for n in range(turns)))
    assert len(tree.nodes) == 2 * turns
    assert len(tree.leaves) == 1


def test_an_import_says_what_it_is(tmp_path: Path) -> None:
    done = import_traces(write(tmp_path / "t.jsonl", session(request([1], 1, 3), name="first")), tmp_path / "out")
    assert (done.sessions, done.requests, done.tokens, done.sampled) == (1, 1, 8, 3)
    with StoreReader(tmp_path / "out") as reader:
        provenance = json.loads(reader.segments[0].open().attrs["provenance"])
        assert reader.groups()[0].task == "first"
        assert not reader.ends()[0].valid
    assert provenance["token_exact"] is False
    assert provenance["block_size"] == SIZE
    assert "synthetic" in provenance["note"]


def test_what_can_not_be_imported_leaves_nothing(tmp_path: Path) -> None:
    good = session(request([1], 1, 3))
    other = {"id": "o", "block_size": 8, "requests": []}
    with pytest.raises(ConfigError, match="session o has blocks of 8, not 4; split the file"):
        import_traces(write(tmp_path / "t.jsonl", good, other), tmp_path / "out")
    with pytest.raises(ConfigError, match="line 2"):
        import_traces(write(tmp_path / "t.jsonl", good, {"id": "x"}), tmp_path / "out")
    with pytest.raises(ConfigError, match="no session"):
        import_traces(write(tmp_path / "t.jsonl"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists"):
        import_traces(write(tmp_path / "t.jsonl", good), tmp_path / "out")


def test_leftovers_of_a_killed_import_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "journal-000000.log").write_bytes(b"torn")
    import_traces(write(tmp_path / "t.jsonl", session(request([1], 1, 3))), tmp_path / "out")
    assert verify(tmp_path / "out") == []
    assert not (tmp_path / "out.partial").exists()


def test_the_documented_trace_can_be_imported(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```json\n(.*)\n```$", DOCUMENT.read_text().split("### Session traces")[1].split("\n### ")[0], re.MULTILINE)
    (tmp_path / "t.jsonl").write_text(text)
    import_traces(tmp_path / "t.jsonl", tmp_path / "out")
    (tree,) = read(tmp_path / "out")
    check_session(tree, {"requests": [{**call, "stop": call.get("stop", "")} for call in calls(json.loads(text))]})
    assert differences(tree) == ["clean", "sub-agent", "clean"]
