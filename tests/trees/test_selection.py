import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trees.catalogue
from tests.trees.forests import SIZE, Model, Play, Turn, forests, turns
from trees.records import CallEnd, Execution, Fate, Intent, Node, NodeKind, Role
from trees.selection import Path, all_paths, select_paths
from trees.store import StoreReader
from trees.tree import Call, Tree, build


def grow(rows: list[Turn]) -> Tree:
    """A tree of one execution from turns, without a store."""
    rng, model = np.random.default_rng(len(rows)), Model()
    calls = []
    for call, turn in enumerate(rows):
        anchors = [-1, *sorted(model.nodes)]
        prompt = len(model.nodes)
        tokens = rng.integers(0, 2, turn.context).astype(np.int32)
        model.nodes[prompt] = Node(prompt, anchors[turn.anchor % len(anchors)], 4, call, NodeKind.CONTEXT, turn.role, tokens)
        sampled = -1
        if turn.sampled:
            sampled, n = prompt + 1, turn.sampled
            columns = (rng.integers(0, 99, n).astype(np.int32), -rng.random(n).astype(np.float32), np.full(n, call, np.int32))
            model.nodes[sampled] = Node(sampled, prompt, 4, call, NodeKind.SAMPLED, turn.role, *columns)
        end = CallEnd(call, 4, sampled, turn.fate, "stop", "clean") if turn.fate is not None else None
        calls.append(Call.of(Intent(call, 4, prompt, turn.role, bytes(16)), end))
    return build(Execution(4, 4 // SIZE, 4 % SIZE, 0), None, list(model.nodes.values()), calls)


whole_turns = turns.filter(lambda turn: turn.fate is not None)


@given(st.lists(whole_turns, min_size=1, max_size=25), st.integers(1, 30), st.integers(-5, 5))
@settings(deadline=None)
def test_every_target_was_sampled_in_a_delivered_call_and_is_trained_once(rows, jmax, seed):
    tree = grow(rows)
    paths = select_paths(tree, jmax, seed)
    assert len(paths) <= jmax
    trained = []
    for index, path in enumerate(paths):
        assert path.index == index
        assert path.targets.any()
        assert path.targets[-1]
        assert len(path.tokens) == len(path.targets) == len(path.logprobs) == len(path.versions)
        assert path.tokens.tolist() == tree.tokens_of(path.nodes).tolist()
        assert list(path.nodes) == tree.path(path.nodes[-1])
        assert path.nodes[-1] in tree.path(path.leaf)
        at = 0
        for node in path.nodes:
            row = tree.nodes[node]
            part = slice(at, at + row.length)
            if path.targets[part].any():
                call = tree.calls[row.call]
                assert (row.kind, call.fate, call.sampled) == (NodeKind.SAMPLED, Fate.DELIVERED, node)
                assert path.targets[part].all()
                where = tree.column_slices([node])[0]
                assert path.logprobs[part].tolist() == tree.columns.logprobs[where].tolist()
                assert path.versions[part].tolist() == tree.columns.versions[where].tolist()
                trained += [(node, i) for i in range(row.length)]
            at += row.length
        assert at == len(path.tokens)
        assert (path.logprobs[~path.targets] == 0).all()
        assert (path.versions[~path.targets] == -1).all()
    assert len(trained) == len(set(trained))
    targets = {(node, i) for node in tree.nodes if tree.is_target(node) for i in range(tree.nodes[node].length)}
    assert set(trained) <= targets
    if len(paths) < jmax:
        assert set(trained) == targets
    if trained:
        assert sum(path.weight * path.targets.sum() for path in paths) == pytest.approx(1.0)
        assert all(path.weight == 1.0 / len(trained) for path in paths)


@given(st.lists(whole_turns, min_size=1, max_size=25), st.integers(0, 5))
@settings(deadline=None)
def test_the_same_seed_makes_the_same_choice_and_more_paths_only_add(rows, seed):
    fewer, again, more = (select_paths(grow(rows), jmax, seed) for jmax in (2, 2, 4))
    assert [path.nodes for path in fewer] == [path.nodes for path in again] == [path.nodes for path in more][: len(fewer)]
    assert [path.targets.tolist() for path in fewer] == [path.targets.tolist() for path in more][: len(fewer)]


@given(st.lists(whole_turns, min_size=1, max_size=25), st.integers(0, 5))
@settings(deadline=None)
def test_a_class_is_taken_only_when_those_above_have_no_target_left(rows, seed):
    tree = grow(rows)
    left = {node for node in tree.nodes if tree.is_target(node)}
    for path in select_paths(tree, 99, seed):
        role = tree.role_of(path.leaf)
        assert all(not left & set(tree.path(leaf)) for leaf in tree.leaves if tree.role_of(leaf) < role)
        left -= set(path.nodes)
    assert not left


def test_a_leaf_is_drawn_in_proportion_to_its_targets():
    rows = [Turn(4, 0, 1, n, Role.MAIN, Fate.DELIVERED, "") for n in (1, 3)]
    first = [select_paths(grow(rows), 1, seed)[0].targets.sum() for seed in range(2000)]
    assert np.mean(np.array(first) == 3) == pytest.approx(0.75, abs=0.04)


def test_an_incomplete_tree_and_one_without_targets_are_not_trained_on():
    delivered = Turn(4, 0, 1, 3, Role.MAIN, Fate.DELIVERED, "")
    assert select_paths(grow([delivered, Turn(4, 0, 1, 3, Role.MAIN, None, "")]), 5, 0) == []
    assert (
        select_paths(grow([Turn(4, 0, 1, 3, Role.MAIN, fate, "") for fate in (Fate.SUPERSEDED, Fate.BROKEN, Fate.CANCELLED)]), 5, 0) == []
    )
    assert len(select_paths(grow([delivered]), 5, 0)) == 1
    with pytest.raises(ValueError, match="jmax = 0"):
        select_paths(grow([delivered]), 0, 0)


def test_the_class_of_a_context_leaf_is_that_of_the_call_it_prompted():
    tree = grow([Turn(4, 0, 1, 0, Role.SUB_AGENT, Fate.BROKEN, "")])
    assert [tree.role_of(leaf) for leaf in tree.leaves] == [Role.SUB_AGENT]


def as_bytes(paths):
    return [(p.execution, p.nodes, p.weight, *(a.tobytes() for a in (p.tokens, p.targets, p.logprobs, p.versions))) for p in paths]


@given(forests, st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_the_rows_of_an_execution_that_is_over_stay_wherever_it_lies(tmp_path_factory, rows, jmax, seed):
    """In the journal, in a segment, in a merged one; while others grow beside it: bit by bit the same rows."""
    directory = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees.catalogue, "FAN", 2)
        play, chosen = Play(directory), {}
        with StoreReader(directory) as reader:
            for turn in rows:
                play.play([turn])
                play.writer.commit()
                reader.refresh()
                for execution in play.model.ends:
                    paths = as_bytes(select_paths(reader.tree(execution), jmax, seed))
                    assert chosen.setdefault(execution, paths) == paths
        play.writer.close()
    with StoreReader(directory) as reader:
        grown = [reader.tree(execution) for execution in chosen]
        trained = [node for tree in grown for path in select_paths(tree, 99, seed) for node in targets_of(tree, path)]
        own = [(tree, node) for tree in grown if not tree.incomplete for node in tree.nodes if tree.is_target(node)]
        assert sorted(trained) == sorted(node for _, node in own)
        assert all(tree.nodes[node].execution == tree.execution.execution for tree, node in own)


def targets_of(tree, path):
    """Nodes of which the path trains tokens."""
    ends = np.cumsum([tree.nodes[node].length for node in path.nodes])
    return [node for node, end in zip(path.nodes, ends, strict=True) if path.targets[end - 1]]


@settings(deadline=None)
@given(st.lists(turns, min_size=1, max_size=25))
def test_all_paths_have_every_target_once(rows: list[Turn]) -> None:
    tree = grow(rows)
    paths = list(all_paths(tree))
    wanted = [] if tree.incomplete else [n for n in tree.nodes if tree.is_target(n) and tree.nodes[n].length]
    found = [node for path in paths for node in path.nodes for _ in range(int(path.targets[_span(tree, path, node)].any()))]
    assert sorted(found) == sorted(wanted)
    assert [path.index for path in paths] == list(range(len(paths)))
    assert not paths or abs(sum(path.weight * path.targets.sum() for path in paths) - 1) < 1e-9
    roles = [tree.role_of(path.leaf) for path in paths]
    assert roles == sorted(roles)


def _span(tree: Tree, path: Path, node: int) -> slice:
    """Where a node's tokens lie in its path."""
    end = tree.path_length(node)
    return slice(end - tree.nodes[node].length, end)
