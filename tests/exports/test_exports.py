"""What is exported is what was recorded, in each format, and what a mistake is answered with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from gyre_hpc.branches import Branch, Branches
from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.events import EventLog
from gyre_hpc.exports import parquet
from gyre_hpc.exports.exporter import Format, Options, export
from gyre_hpc.exports.lineage import FIELDS, Lineages
from gyre_hpc.exports.rows import Table
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import tiny_model, tool_call
from tests.trees.forests import Play, Turn, forests
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.store import StoreReader, StoreWriter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def user(text: str) -> Message:
    return Message("user", ({"type": "text", "text": text},))


def result(text: str) -> Message:
    return Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": [text], "is_error": False},))


class Conversations:
    """Records calls of one execution as the gateway does: context, then an answer."""

    def __init__(self, folder: Path, renderer: TurnRenderer) -> None:
        self.writer = StoreWriter(folder, {"seed": 7})
        self.renderer = renderer
        self.execution = self.writer.allocate_execution()
        self.writer.append(Group(self.execution, "tasks/a", 1, 3, 0))
        self.writer.append(Execution(self.execution, self.execution, 0, 0))

    def call(self, parent: int, context: list[list[int]], answer: str, role: Role = Role.MAIN, fate: Fate = Fate.DELIVERED) -> int:
        """The node of the answer."""
        call = self.writer.allocate_call()
        for ids in context:
            parent = self.writer.context_node(parent, np.array(ids, np.int32), self.execution, call, role)
        self.writer.append(Intent(call, self.execution, parent, role, bytes(16)))
        tokens = np.array([*self.renderer.tokenizer.encode(answer).ids, self.renderer.turn_end], np.int32)
        node, n = self.writer.allocate_node(), len(tokens)
        logprobs, versions = (-np.arange(n) / 8).astype(np.float32), np.full(n, 3, np.int32)
        self.writer.append(Node(node, parent, self.execution, call, NodeKind.SAMPLED, role, tokens, logprobs, versions))
        self.writer.append(CallEnd(call, self.execution, node, fate, "stop", "clean"))
        return node

    def end(self) -> None:
        self.writer.append(ExecutionEnd(self.execution, "finished", 0.5, True, 4, 10, 1.0))
        self.writer.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A run with one execution: two turns with tools, a sub-agent, and a main conversation that begins anew after a compaction."""
    folder = tmp_path_factory.mktemp("run")
    config = Config().model_dump(mode="json")
    config["model"]["path"] = str(model)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    renderer = TurnRenderer(model)
    made = Conversations(folder / "trees", renderer)
    root = renderer.split(renderer.root(Conversation(Head("Be good."), (user("Do it."),))))
    first = made.call(-1, root, "<think>hm</think>I look.\n" + tool_call("bash", command="ls"))
    second = made.call(
        first, [renderer.delta([result("a b")], True)], "Two:\n" + tool_call("bash", command="cat a") + tool_call("bash", n=1)
    )
    made.call(second, [renderer.delta([result("c"), result("d")], True)], "Step 1.", Role.MAIN_SUMMARY)
    made.call(-1, [renderer.root(Conversation(Head("Sub."), (user("Part."),)))], "part done", Role.SUB_AGENT)
    last = made.call(-1, [root[0], renderer.root(Conversation(Head(), (user("Step 1. Go on."),)))], "Done.")
    made.call(last, [renderer.delta([user("Really?")], True)], "Yes.")
    made.end()
    return folder


# -- Parquet ----------------------------------------------------------------------------------------------------------------------------
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forests)
def test_every_target_stands_in_one_path(tmp_path_factory: pytest.TempPathFactory, turns: list[Turn]) -> None:
    folder = tmp_path_factory.mktemp("store")
    play = Play(folder)
    play.play(turns)
    play.writer.close()
    export(folder, folder / "a.parquet", Options(Format.PARQUET))
    rows = pq.read_table(folder / "a.parquet").to_pylist()
    with StoreReader(folder) as reader:
        trees = {e: reader.tree(e) for e in reader.executions()}
    for execution, tree in trees.items():
        own = [row for row in rows if row["execution"] == execution]
        total = 0 if tree.incomplete else sum(tree.nodes[n].length for n in tree.nodes if tree.is_target(n))
        assert sum(sum(row["targets"]) for row in own) == total == sum(row["target_tokens"] for row in own)
        assert not own or sum(row["weight"] * row["target_tokens"] for row in own) == pytest.approx(1.0)
        for row in own:
            lengths = {len(row[name]) for name in ("tokens", "targets", "logprobs", "versions")}
            assert lengths == {len(row["tokens"])}
            assert row["tokens"] == tree.tokens_of(tree.path(row["leaf"])).tolist()[: len(row["tokens"])]
            assert tree.columns is not None
            at = np.concatenate([np.arange(s.start, s.stop) for s in tree.column_slices(tree.path(row["leaf"]))])[: len(row["tokens"])]
            targets = np.array(row["targets"])
            assert np.array_equal(np.array(row["logprobs"], np.float32), np.where(targets, tree.columns.logprobs[at], np.float32(0)))
            assert np.array_equal(np.array(row["versions"]), np.where(targets, tree.columns.versions[at], -1))


def test_the_other_tables_have_everything_once(run: Path, tmp_path: Path) -> None:
    with StoreReader(run / "trees") as reader:
        tree = reader.tree(0)
    tables = {}
    for table in Table:
        found = export(run, tmp_path / "a.parquet", Options(Format.PARQUET, table))
        tables[table] = pq.read_table(tmp_path / "a.parquet")
        assert found["rows"] == tables[table].num_rows
        assert tables[table].column_names == [name for name, _ in parquet.COLUMNS[table]]
        assert orjson.loads(tables[table].schema.metadata[b"gyre"])["table"] == table
    nodes = tables[Table.NODES].to_pylist()
    assert [row["node"] for row in nodes] == list(tree.nodes)
    assert [t for row in nodes for t in row["tokens"]] == tree.tokens_of(tree.nodes).tolist()
    assert all((row["logprobs"] is None) == (row["kind"] == "context") for row in nodes)
    assert [row["call"] for row in tables[Table.CALLS].to_pylist()] == list(tree.calls)
    (execution,) = tables[Table.EXECUTIONS].to_pylist()
    assert (execution["score"], execution["task"], execution["leaves"]) == (0.5, "tasks/a", len(tree.leaves))
    assert execution["tokens"] == sum(row.length for row in tree.nodes.values())


def test_jmax_cuts_the_choice_as_training_does(run: Path, tmp_path: Path) -> None:
    counts = [export(run, tmp_path / "a.parquet", Options(Format.PARQUET, None, jmax))["rows"] for jmax in (1, 2, None)]
    assert counts == [1, 2, 3]


def test_row_groups_bound_the_memory(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 2)
    file = tmp_path / "a.parquet"
    rows = [
        {"execution": i, **dict.fromkeys(("call", "prompt", "sampled"), i), **dict.fromkeys(("role", "fate", "finish", "difference"))}
        for i in range(5)
    ]
    assert parquet.write(file, Table.CALLS, rows, {}) == 5
    assert pq.ParquetFile(file).num_row_groups == 3
    assert pq.read_table(file)["execution"].to_pylist() == list(range(5))
    assert parquet.write(file, Table.CALLS, [], {}) == 0
    assert pq.read_table(file).num_rows == 0


# -- which weights ------------------------------------------------------------------------------------------------------------------------
def test_versions_of_weights_that_were_given_up_are_told_apart(tmp_path: Path, model: Path) -> None:
    """Steps 4 and 5 were given up for checkpoint 3, then 6 and 7 for checkpoint 5: tokens of version 5 are of three kinds of weights."""
    folder = tmp_path / "run"
    folder.mkdir()
    writer = StoreWriter(folder / "trees", {"seed": 7})
    for number in range(3):
        writer.append(Group(number, "t", 1, 5, 0))
    for number in range(4):  # one a lineage, and the last group is tried again in the last
        execution = writer.allocate_execution()
        writer.append(Execution(execution, min(number, 2), 0, number // 3))
        call = writer.allocate_call()
        root = writer.context_node(-1, np.array([2], np.int32), execution, call, Role.MAIN)
        node = writer.allocate_node()
        writer.append(Intent(call, execution, root, Role.MAIN, bytes(16)))
        writer.append(
            Node(
                node,
                root,
                execution,
                call,
                NodeKind.SAMPLED,
                Role.MAIN,
                np.array([1], np.int32),
                np.array([-1.0], np.float32),
                np.array([5], np.int32),
            )
        )
        writer.append(CallEnd(call, execution, node, Fate.DELIVERED, "stop", "clean"))
        writer.append(ExecutionEnd(execution, "finished", 0.5, True, 1, 1, 1.0))
    writer.close()
    events = EventLog(folder / "events.jsonl")
    events.emit("steps.again", step=3, newest=5, first_group=1, first_execution=1)
    events.emit("steps.again", step=5, newest=7, first_group=3, first_execution=2)

    export(folder, tmp_path / "a.jsonl", Options())
    lines = [orjson.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    facts = [[line[name] for name in FIELDS] for line in lines]
    assert facts == [[0, 3, 0, 3], [1, 5, 1, 5], [2, None, 1, 5], [2, None, 1, 5]]
    for table in (Table.PATHS, Table.EXECUTIONS):
        export(folder, tmp_path / "a.parquet", Options(Format.PARQUET, table))
        assert [[row[name] for name in FIELDS] for row in pq.read_table(tmp_path / "a.parquet").to_pylist()] == facts
    export(folder, tmp_path / "a.parquet", Options(Format.PARQUET, Table.NODES))
    sampled = [row for row in pq.read_table(tmp_path / "a.parquet").to_pylist() if row["kind"] == "sampled"]
    assert [[row["lineage"], row["fork"]] for row in sampled] == [fact[:2] for fact in facts]
    export(folder / "trees", tmp_path / "b.jsonl", Options())
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes(), "the run lies above"
    export(folder, tmp_path / "atif", Options(Format.ATIF, model=model))
    first = orjson.loads((tmp_path / "atif" / "execution-000000.json").read_bytes())
    assert [first["extra"][name] for name in FIELDS] == facts[0]


def test_what_training_counts_is_what_the_columns_say() -> None:
    """The forks of an export against the branches by which distances are counted."""
    forks = [Branch(6, 10, 40), Branch(4, 20, 80), Branch(5, 30, 120)]
    lineages, branches = Lineages(forks), Branches()
    for fork in forks:
        branches = branches.resumed(fork, 0)
    for execution in (0, 39, 40, 79, 80, 119, 120, 500):
        assert lineages.facts(0, execution)["fork"] == branches.of_execution(execution)


# -- ATIF -------------------------------------------------------------------------------------------------------------------------------
def check_atif(document: dict[str, Any]) -> None:
    """The rules of ATIF's RFC that a document can break: keys, step ids, what belongs to agents' steps, references, ids below."""
    assert set(document) <= {"schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra"} | {
        "subagent_trajectories"
    }
    assert set(document["agent"]) == {"name", "version", "model_name"}
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        agents = {"reasoning_content", "tool_calls", "metrics", "llm_call_count"}
        assert set(step) <= {"step_id", "source", "message", "observation", "is_copied_context", "extra"} | agents
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not agents & set(step)
        assert isinstance(step["message"], str)
        ids = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        assert all(set(call) == {"tool_call_id", "function_name", "arguments"} for call in step.get("tool_calls", []))
        results = step.get("observation", {"results": []})["results"]
        assert all(set(r) <= {"source_call_id", "content"} and r.get("source_call_id") in {None, *ids} for r in results)
    below = document.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in below}) == len(below)
    for one in below:
        check_atif(one)


@pytest.fixture(scope="module")
def document(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out") / "atif"
    assert export(run, out, Options(Format.ATIF))["executions"] == 1
    (file,) = out.iterdir()
    return dict(orjson.loads(file.read_bytes()))


def test_a_document_follows_the_format(document: dict[str, Any], model: Path) -> None:
    check_atif(document)
    assert (document["schema_version"], document["session_id"]) == ("ATIF-v1.7", "execution-0")
    assert document["agent"]["model_name"] == str(model)
    assert (document["extra"]["score"], document["extra"]["task"], document["extra"]["role"]) == (0.5, "tasks/a", "main")


def test_the_main_conversation_as_it_ended(document: dict[str, Any]) -> None:
    steps = document["steps"]
    assert [(step["source"], step["message"]) for step in steps[2:]] == [("agent", "Done."), ("user", "Really?"), ("agent", "Yes.")]
    assert [step["source"] for step in steps[:2]] == ["system", "user"]
    assert "Be good." in steps[0]["message"]


def test_what_was_before_and_beside_it_is_below(document: dict[str, Any]) -> None:
    before, beside = document["subagent_trajectories"]
    assert [one["extra"]["role"] for one in (before, beside)] == ["main_summary", "sub_agent"]
    system, task, first, second, summary = before["steps"]
    assert system["is_copied_context"]
    assert "Do it." in task["message"]
    assert (first["reasoning_content"], first["message"]) == ("hm", "I look.")
    assert first["tool_calls"] == [{"tool_call_id": "toolu_00000000_0", "function_name": "bash", "arguments": {"command": "ls"}}]
    assert first["observation"]["results"] == [{"source_call_id": "toolu_00000000_0", "content": "a b"}]
    assert len(second["tool_calls"]) == 2
    assert "c" in second["observation"]["results"][0]["content"]
    assert summary["message"] == "Step 1."
    assert beside["steps"][-1]["message"] == "part done"


def test_sampled_tokens_are_the_recorded_ones_and_each_is_new_once(document: dict[str, Any], run: Path) -> None:
    with StoreReader(run / "trees") as reader:
        tree = reader.tree(0)
    steps = [step for one in (document, *document["subagent_trajectories"]) for step in one["steps"] if step["source"] == "agent"]
    fresh = [step["metrics"] for step in steps if not step.get("is_copied_context")]
    assert sorted(m["extra"]["node"] for m in fresh) == [n for n, row in tree.nodes.items() if row.kind is NodeKind.SAMPLED]
    for metrics in fresh:
        node = metrics["extra"]["node"]
        assert metrics["completion_token_ids"] == tree.tokens_of([node]).tolist()
        assert len(metrics["logprobs"]) == metrics["completion_tokens"] == tree.nodes[node].length
        assert metrics["prompt_tokens"] == tree.path_length(node) - tree.nodes[node].length
    assert document["final_metrics"]["total_completion_tokens"] == sum(m["completion_tokens"] for m in fresh)


def test_a_history_that_many_leaves_share_is_written_out_once(tmp_path: Path, model: Path) -> None:
    renderer = TurnRenderer(model)
    made = Conversations(tmp_path / "trees", renderer)
    root = renderer.split(renderer.root(Conversation(Head("Be good."), (user("Do it."),))))
    last = made.call(-1, root, "I look.\n" + tool_call("bash", command="ls"))
    last = made.call(last, [renderer.delta([result("a b")], True)], "Seen.")
    for again in range(3):
        made.call(last, [renderer.delta([user(f"Try {again}")], True)], f"Done {again}.")
    made.end()
    export(tmp_path / "trees", tmp_path / "out", Options(Format.ATIF, model=model))
    document = orjson.loads((tmp_path / "out" / "execution-000000.json").read_bytes())
    check_atif(document)
    whole, *others = [document["steps"], *(one["steps"] for one in document["subagent_trajectories"])]
    assert [step["message"] for step in whole if step["source"] == "agent"] == ["I look.", "Seen.", "Done 2."]
    for again, steps in enumerate(others):
        assert [step.get("is_copied_context", False) for step in steps] == [True, True, True, True, False, False]
        assert steps[-1]["message"] == f"Done {again}."
        for old, new in zip(whole[:4], steps[:4], strict=True):
            same = {"source", "message", "tool_calls", "observation"}
            assert {key: old.get(key) for key in same} == {key: new.get(key) for key in same}
            assert "completion_token_ids" not in new.get("metrics", {})
            assert new.get("metrics", {}).get("completion_tokens") == old.get("metrics", {}).get("completion_tokens")


# -- mistakes ---------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (Options(table=Table.NODES), "--table with --format jsonl; it belongs to --format parquet"),
        (Options(Format.PARQUET, model=Path("m")), "--model with --format parquet"),
        (Options(Format.PARQUET, Table.CALLS, 2), "--jmax with --table calls"),
    ],
)
def test_options_that_mean_nothing_are_refused(run: Path, tmp_path: Path, options: Options, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        export(run, tmp_path / "out", options)
    assert not list(tmp_path.iterdir())


def test_places_that_are_taken(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="give a new folder"):
        export(run, tmp_path, Options(Format.ATIF))
    with pytest.raises(ConfigError, match="give a file"):
        export(run, tmp_path, Options(Format.PARQUET))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("form", Format)
def test_what_is_no_file_is_never_replaced(run: Path, tmp_path: Path, form: Format) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ConfigError, match=f"{name} can't be written; "):
            export(run, tmp_path / name, Options(form))
    assert (tmp_path / "link").is_symlink()
    assert [child.name for child in sorted(tmp_path.iterdir()) if child.is_fifo()] == ["link", "pipe"]


@pytest.mark.parametrize("form", [Format.JSONL, Format.ATIF])
def test_a_link_stays_one(run: Path, tmp_path: Path, form: Format) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):
        export(run, link, Options(form))
        assert link.is_symlink()
        assert target.exists()


def test_trees_alone_need_a_model_for_their_text(run: Path, tmp_path: Path, model: Path) -> None:
    alone = tmp_path / "alone"
    subprocess.run(["cp", "-r", run / "trees", alone], check=True)
    with pytest.raises(ConfigError, match="give --model"):
        export(alone, tmp_path / "out", Options(Format.ATIF))
    assert export(alone, tmp_path / "out", Options(Format.ATIF, model=model))["executions"] == 1


def test_nothing_half_written_stays(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        Path(str(given[0])).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write", full)
    with pytest.raises(GyreError, match=r"a\.parquet: no space left"):
        export(run, tmp_path / "a.parquet", Options(Format.PARQUET))
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gyre_hpc.exports.parquet", raising=False)
    monkeypatch.delattr("gyre_hpc.exports.parquet", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pyarrow"):
        export(run, tmp_path / "a.parquet", Options(Format.PARQUET))


def test_the_command(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def gyre(*words: object) -> int:
        from gyre_hpc.cli import main

        monkeypatch.setattr(sys, "argv", ["gyre", "trees", "export", str(run), "--out", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    assert gyre(tmp_path / "a.parquet", "--format", "parquet", "--table", "nodes", "--json") == 0
    assert set(orjson.loads(capsys.readouterr().out)) == {"format", "table", "file", "rows", "bytes"}
    assert gyre(tmp_path / "a.jsonl") == 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
    capsys.readouterr()
    assert gyre(tmp_path / "a", "--format", "csv") == 2
    assert capsys.readouterr().err == "gyre: --format csv; one of jsonl, parquet, atif\n"
