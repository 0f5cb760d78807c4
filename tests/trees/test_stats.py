from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trees.forests import Play, forests
from trees.records import NodeKind
from trees.stats import differences, ls, outline, show, stats
from trees.store import StoreReader


@given(forests, st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_numbers_agree_with_a_plain_count(tmp_path_factory, turns, seed):
    directory = tmp_path_factory.mktemp("store")
    play = Play(directory, seed)
    play.play(turns)
    play.writer.close()
    model = play.model
    leaves = {e: [n for n in nodes if not any(model.nodes[m].parent == n for m in nodes)] for e, nodes in model.of.items()}
    expanded = sum(len(model.nodes[n].tokens) for found in leaves.values() for leaf in found for n in model.path(leaf))
    stored = sum(len(node.tokens) for node in model.nodes.values())
    got = stats(directory)
    assert got["executions"] == len(model.of)
    assert got["ended"] == len(model.ends)
    assert got["nodes"] == len(model.nodes)
    assert got["leaves"] == sum(map(len, leaves.values()))
    assert (got["stored_tokens"], got["expanded_tokens"]) == (stored, expanded)
    assert got["ratio"] == (expanded / stored if stored else 0.0)
    assert got["bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    assert got["incomplete"] == len({intent.execution for intent, end in model.calls.values() if end is None})
    over = sum(end is not None for _, end in model.calls.values())
    assert got["differences"] == ({"clean": over} if over else {})
    assert got["calls"] == sum(got["fates"].values()) == len(model.calls)
    assert got["sampled_tokens"] == sum(len(n.tokens) for n in model.nodes.values() if n.kind is NodeKind.SAMPLED)
    assert [row["nodes"] for row in ls(directory)] == [len(model.of[e]) for e in sorted(model.of)]
    assert stats(directory) == got
    rows = differences(directory)
    assert [row["execution"] for row in rows] == sorted(model.of)
    assert sum(row["clean"] for row in rows) == over
    assert sum(row["open"] for row in rows) == len(model.calls) - over
    assert sum(row["calls"] for row in rows) == len(model.calls)
    assert not any(row["other"] or row["drift"] for row in rows)
    assert sum(row["incomplete"] for row in rows) == got["incomplete"]
    found = show(directory, 0)
    assert {row["node"] for row in found["nodes"]} == model.of[0]
    with StoreReader(directory) as reader:
        assert len(outline(reader.tree(0))) == len(model.of[0])
