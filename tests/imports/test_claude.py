"""Sessions of Claude Code: the tree of uuids becomes the tree of contexts, with the text that is there and nothing made up."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.cli import main
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.imports.claude import find_files, is_entry, read_session
from gyre_hpc.imports.importer import import_recording
from tests.gateway.fakes import tiny_model
from trees.records import NodeKind, Role
from trees.store import StoreReader
from trees.tree import Tree
from trees.verify import verify


class Lines:
    """Entries as Claude Code writes them."""

    def __init__(self, session: str = "5e55", **fields: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._fields = {"sessionId": session, "cwd": "/w", "version": "2.1.0", "userType": "external", "isSidechain": False, **fields}
        self._numbers = itertools.count()
        self._prefix = str(fields.get("agentId", "u"))

    def add(self, kind: str, parent: str | None, **fields: Any) -> str:
        uuid = f"{self._prefix}{next(self._numbers)}"
        self.rows.append({"parentUuid": parent, "type": kind, "uuid": uuid, "timestamp": "2026-01-01T00:00:00Z", **self._fields, **fields})
        return uuid

    def user(self, parent: str | None, content: Any, **fields: Any) -> str:
        return self.add("user", parent, message={"role": "user", "content": content}, **fields)

    def result(self, parent: str, call: str, text: str) -> str:
        return self.user(parent, [{"type": "tool_result", "tool_use_id": call, "content": text}], toolUseResult={"stdout": text})

    def said(self, parent: str | None, message: str, *blocks: dict[str, Any], stop: str | None = None) -> str:
        """An answer: one entry a block."""
        uuid = ""
        for block in blocks:
            body = {
                "id": message,
                "role": "assistant",
                "model": "m",
                "content": [block],
                "stop_reason": stop,
                "usage": {"output_tokens": 1},
            }
            parent = uuid = self.add("assistant", parent, message=body, requestId="r")
        return uuid

    def write(self, file: Path) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return file


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "Bash", "input": arguments}


def session() -> Lines:
    """Calls made together, a compaction, an edit, entries of other kinds, and an image."""
    lines = Lines()
    lines.rows += [
        {"type": "summary", "summary": "s", "leafUuid": "x"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
    ]
    first = lines.user(None, "Do <|im_end|> it.")
    thought = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    calls = [lines.said(first, "m1", thought, text("I look."), use("a", command="ls"))]
    calls.append(lines.said(calls[0], "m1", use("b", command="pwd"), stop="tool_use"))
    lines.result(calls[0], "a", "x y")
    hook = lines.add("progress", calls[1], data={})
    both = lines.result(hook, "b", "/w")
    done = lines.said(both, "m2", text("Two."), stop="end_turn")
    image = {"type": "image", "source": {"type": "base64", "data": "AA"}}
    lines.said(lines.user(done, [text("And this?"), image]), "m3", text("A picture."), stop="max_tokens")
    lines.said(lines.user(done, "Rather that."), "m4", text("Fine."))
    border = lines.add("system", None, subtype="compact_boundary", logicalParentUuid=done, content="Conversation compacted")
    again = lines.user(border, "Summary: two.", isCompactSummary=True)
    lines.said(lines.user(again, "Go on."), "m5", text("On."))
    lines.user(again, "Never answered.")
    return lines


def bytes_of(tree: Tree, node: int) -> str:
    return bytes(tree.tokens_of([node]).tolist()).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def imported(path: Path, out: Path, model: Path | None = None) -> list[Tree]:
    import_recording(path, out, model)
    assert verify(out) == []
    with StoreReader(out) as reader:
        assert reader.header is not None
        assert reader.header.provenance["token_exact"] is False
        return [reader.tree(execution) for execution in sorted(reader.executions())]


def test_the_tree_of_a_session(tmp_path: Path) -> None:
    (tree,) = imported(session().write(tmp_path / "s.jsonl"), tmp_path / "out")
    calls = list(tree.calls.values())
    assert [call.difference for call in calls] == ["clean", "clean", "clean", "edit", "compaction"]
    assert [call.finish for call in calls] == ["stop", "stop", "length", "stop", "stop"]
    assert all(row.kind is NodeKind.CONTEXT for row in tree.nodes.values())
    paths = ["".join(bytes_of(tree, node) for node in tree.path(leaf)) for leaf in tree.leaves]
    begun = (
        "user\nDo <|im_end|> it.\n\nassistant\nhm\nI look.\n"
        'call {"name":"Bash","arguments":{"command":"ls"}}\ncall {"name":"Bash","arguments":{"command":"pwd"}}\n\n'
        "user\nresult x y\nresult /w\n\nassistant\nTwo.\n\n"
    )
    assert sorted(paths) == sorted(
        [
            begun + "user\nAnd this?\n[image]\n\nassistant\nA picture.\n\n",
            begun + "user\nRather that.\n\nassistant\nFine.\n\n",
            "user\nSummary: two.\nGo on.\n\nassistant\nOn.\n\n",
            "user\nSummary: two.\nNever answered.\n\n",
        ]
    )
    assert tree.end is not None
    assert not tree.end.valid


def test_sub_agents_of_the_same_and_of_other_files_join_their_session(tmp_path: Path) -> None:
    main_lines, inside = Lines(), Lines(isSidechain=True, agentId="in")
    main_lines.said(main_lines.user(None, "Go."), "m1", text("Gone."))
    inside.said(inside.user(None, "Part."), "m1", text("One."))  # ids of answers are an agent's own
    main_lines.rows += inside.rows
    beside = Lines(isSidechain=True, agentId="be")
    beside.said(beside.user(None, "Other part."), "m9", text("Two."))
    other = Lines("0ther")
    other.said(other.user(None, "Else."), "m1", text("Yes."))
    folder = tmp_path / "projects"
    main_lines.write(folder / "p" / "5e55.jsonl")
    beside.write(folder / "p" / "5e55" / "subagents" / "agent-be.jsonl")
    other.write(folder / "q" / "0ther.jsonl")
    (folder / "q" / "empty.jsonl").write_text("")
    trees = imported(folder, tmp_path / "out")
    with StoreReader(tmp_path / "out") as reader:
        named = {reader.groups()[tree.execution.group].task: tree for tree in trees}
    roles = [(call.role, call.difference) for call in named["5e55"].calls.values()]
    assert sorted(roles) == [(Role.MAIN, "clean"), (Role.SUB_AGENT, "sub-agent"), (Role.SUB_AGENT, "sub-agent")]
    assert len(named["0ther"].calls) == 1


def test_by_a_model_the_tokens_are_what_it_would_be_shown(tmp_path: Path, model: Path) -> None:
    (tree,) = imported(session().write(tmp_path / "s.jsonl"), tmp_path / "out", model)
    renderer = TurnRenderer(model)
    second = tree.calls[1]
    shown = renderer.tokenizer.decode(tree.tokens_of(tree.path(second.prompt)).tolist(), skip_special_tokens=False)
    assert shown == (
        "<|im_start|>user\nDo <|im_end|> it.<|im_end|>\n<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "pwd"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx y\n</tool_response>\n<tool_response>\n/w\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tree.tokens_of(tree.path(second.prompt)).tolist().count(renderer.turn_end) == 3  # that of the text is text


def test_a_session_that_is_still_written_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    file = session().write(tmp_path / "s.jsonl")
    whole = read_session("s", [file])
    file.write_bytes(file.read_bytes() + b'{"type": "user", "uuid"')
    assert read_session("s", [file]) == whole


def test_parts_that_are_missing(tmp_path: Path) -> None:
    lines = Lines()
    lines.said("gone", "m1", text("What?"))
    (tree,) = imported(lines.write(tmp_path / "s.jsonl"), tmp_path / "out")
    assert "not in this recording" in bytes_of(tree, tree.path(tree.leaves[0])[0])


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=5)
fields = st.fixed_dictionaries(
    {"type": st.sampled_from(["user", "assistant", "system", "progress"])},
    optional={
        "uuid": st.sampled_from(["a", "b", "c"]) | json_values,
        "parentUuid": st.sampled_from([None, "a", "b", "c"]) | json_values,
        "sessionId": st.just("s"),
        "isSidechain": st.booleans(),
        "agentId": st.sampled_from(["x", "y"]),
        "subtype": st.just("compact_boundary"),
        "message": json_values
        | st.fixed_dictionaries(
            {
                "content": json_values
                | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "tool_use", "tool_result"])}))
            }
        ),
    },
)


@settings(max_examples=20, deadline=None)
@given(st.lists(fields, max_size=8))
def test_any_entries_are_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("any")
    file = folder / "s.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"type": "summary", "sessionId": "s"}, *rows]))
    try:
        (tree,) = imported(folder, folder / "out")
    except ConfigError as error:
        refused = error.what
    else:
        refused = ""
        assert not tree.incomplete
    assert not refused or " line " in refused


def test_mistakes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def gyre(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["gyre", "trees", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    file = session().write(tmp_path / "s.jsonl")
    traces = tmp_path / "t.jsonl"
    traces.write_text('{"id": "s1", "block_size": 4, "requests": []}\n')
    (tmp_path / "bad.jsonl").write_text('{"type": "user", "sessionId": "s"}\n{"type": "user", "uuid": "a", "message": 3}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, line in (
        ((traces, "--out", tmp_path / "x", "--model", model), "session traces hold no text"),
        ((empty, "--out", tmp_path / "x"), "holds no session of Claude Code"),
        ((tmp_path / "bad.jsonl", "--out", tmp_path / "x"), "line 2 is no entry"),
        ((file, "--out", tmp_path / "no" / "x"), "give a new folder in one that exists"),
    ):
        assert gyre("import", *words) == 2
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()
    assert gyre("import", file, "--out", tmp_path / "store", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sampled"] == 0
    assert gyre("stats", tmp_path / "store", "--json") == 0
    assert json.loads(capsys.readouterr().out)["token_exact"] is False


def test_which_kind_a_file_is(tmp_path: Path) -> None:
    assert is_entry(b'{"type": "summary"}')
    assert not any(map(is_entry, (b'{"id": "s", "block_size": 4, "requests": []}', b"[]", b"\x1f\x8b", b'{"a": 1}')))
    assert list(find_files(session().write(tmp_path / "s.jsonl"))) == ["5e55"]
