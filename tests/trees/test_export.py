"""What is exported is what was appended, bit for bit and once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import orjson
from hypothesis import given, settings

from tests.trees.forests import Play, Turn, forests
from trees.export import exported
from trees.records import NodeKind
from trees.store import StoreReader


@settings(max_examples=30, deadline=None)
@given(forests)
def test_json_holds_the_whole_store(turns: list[Turn]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder))
        play.play(turns)
        play.writer.close()
        with StoreReader(Path(folder)) as reader:
            rows = [orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in exported(reader)]
            targets = {n for e in reader.executions() for n in reader.tree(e).nodes if reader.tree(e).is_target(n)}
    model = play.model
    assert [row["execution"] for row in rows] == list(range(6))
    assert [(row["group"], row["index"], row["task"], row["size"]) for row in rows] == [
        (e // 3, e % 3, f"tasks/{e // 3}", 3) for e in range(6)
    ]
    assert [row["reason"] for row in rows] == [model.ends[e].reason if e in model.ends else None for e in range(6)]
    for row in rows:
        assert {node["node"] for node in row["nodes"]} == model.of[row["execution"]]
        for found in row["nodes"]:
            node = model.nodes[found["node"]]
            assert (found["parent"], found["tokens"], found["target"]) == (node.parent, node.tokens.tolist(), node.node in targets)
            assert ("logprobs" in found) == (node.kind is NodeKind.SAMPLED)
            if node.logprobs is not None and node.versions is not None:
                assert np.array(found["logprobs"], np.float32).tobytes() == node.logprobs.tobytes()
                assert found["versions"] == node.versions.tolist()
    sampled = [n["node"] for row in rows for n in row["nodes"] if n["kind"] == "sampled"]
    assert sorted(sampled) == sorted(n.node for n in model.nodes.values() if n.kind is NodeKind.SAMPLED)
    assert sorted(c["call"] for row in rows for c in row["calls"]) == sorted(model.calls)
    assert all((call["fate"] is None) == (model.calls[call["call"]][1] is None) for row in rows for call in row["calls"])
