"""What a store holds, in numbers and as text: behind `gyre trees stats`, `ls` and `show`. Reads only; works while a writer writes.

`stored_tokens` counts every node once; `expanded_tokens` is what the leaves' root-to-leaf paths hold when each is written out,
execution by execution; `ratio` is expanded / stored: how much the trees save.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trees.reader import StoreReader, locate
from trees.records import NodeKind
from trees.tree import Tree

DIFFERENCES = ("clean", "retry", "edit", "compaction", "sub-agent", "side-query", "lost-call", "drift", "open")
"""How a call relates to what was recorded before it; a recorder may know more."""


def stats(path: Path) -> dict[str, Any]:
    """Counts of the store at `path` (a store or a run directory). StoreError if there is none."""
    directory = locate(path)
    with StoreReader(directory) as reader:
        reader.check()
        totals: Counter[str] = Counter()
        differences: Counter[str] = Counter()
        fates: Counter[str] = Counter()
        for execution in reader.executions():
            tree = reader.tree(execution, tokens=False)
            totals.update(_measure(tree))
            differences.update(call.difference for call in tree.calls.values() if call.fate is not None)
            fates.update("open" if call.fate is None else call.fate.name.lower() for call in tree.calls.values())
        nodes, stored = _stored(reader)
        expanded = totals["expanded"]
        return {
            "executions": len(reader.executions()),
            "ended": len(reader.ends()),
            "groups": len(reader.groups()),
            "nodes": nodes,
            "leaves": totals["leaves"],
            "calls": totals["calls"],
            "stored_tokens": stored,
            "expanded_tokens": expanded,
            "sampled_tokens": totals["sampled"],
            "target_tokens": totals["targets"],
            "ratio": expanded / stored if stored else 0.0,
            "bytes": sum(file.stat().st_size for file in directory.iterdir() if file.suffix in (".h5", ".log")),
            "segments": len(reader.segments),
            "differences": dict(sorted(differences.items())),
            "fates": dict(sorted(fates.items())),
            "incomplete": totals["incomplete"],
            "lost": len(reader.lost),
        }


def ls(path: Path) -> list[dict[str, Any]]:
    """One row for each execution, by id."""
    with StoreReader(locate(path)) as reader:
        reader.check()
        return [_row(reader.tree(execution, tokens=False)) for execution in reader.executions()]


def differences(path: Path) -> list[dict[str, Any]]:
    """One row for each execution, by id: its calls by how they related to what was recorded, and `open` ones, of which no end was."""
    rows = []
    with StoreReader(locate(path)) as reader:
        reader.check()
        for execution in reader.executions():
            tree = reader.tree(execution, tokens=False)
            counts = Counter(call.difference if call.fate is not None else "open" for call in tree.calls.values())
            known = {name: counts[name] for name in DIFFERENCES}
            others = counts.total() - sum(known.values())
            rows.append({"execution": execution, "calls": len(tree.calls), **known, "other": others, "incomplete": tree.incomplete})
    return rows


def show(path: Path, execution: int) -> dict[str, Any]:
    """One execution: its row, its nodes (with path lengths) and calls. KeyError if there is no such execution."""
    with StoreReader(locate(path)) as reader:
        reader.check()
        tree = reader.tree(execution, tokens=False)
    nodes = [
        {
            "node": row.node,
            "parent": row.parent,
            "kind": row.kind.name.lower(),
            "role": row.role.name.lower(),
            "call": row.call,
            "length": row.length,
            "end": tree.path_length(row.node),
            "target": tree.is_target(row.node),
            "shared": row.execution != execution,
        }
        for row in tree.nodes.values()
    ]
    return {**_row(tree), "nodes": nodes, "calls": call_rows(tree)}


def call_rows(tree: Tree) -> list[dict[str, Any]]:
    """The calls of a tree, by id."""
    return [
        {
            "call": call.call,
            "prompt": call.prompt,
            "sampled": call.sampled,
            "role": call.role.name.lower(),
            "fate": None if call.fate is None else call.fate.name.lower(),
            "finish": call.finish,
            "difference": call.difference,
        }
        for call in tree.calls.values()
    ]


def outline(tree: Tree) -> list[str]:
    """The tree as indented lines; a chain without forks stays at its depth."""
    lines: list[str] = []
    stack = [(node, 0) for node in reversed(tree.children[-1])]
    while stack:
        node, depth = stack.pop()
        row = tree.nodes[node]
        kind = "context" if row.kind is NodeKind.CONTEXT else "target" if tree.is_target(node) else "sampled, not trained"
        call = f", call {row.call}" if row.call >= 0 else ""
        lines.append(f"{'  ' * depth}{node}: {row.length} tokens, {kind}, {row.role.name.lower()}{call}")
        below = tree.children[node]
        stack += [(child, depth + (len(below) > 1)) for child in reversed(below)]
    return lines


def _measure(tree: Tree) -> dict[str, int]:
    ends: dict[int, int] = {-1: 0}
    for row in tree.nodes.values():
        ends[row.node] = ends[row.parent] + row.length
    return {
        "leaves": len(tree.leaves),
        "calls": len(tree.calls),
        "expanded": sum(ends[leaf] for leaf in tree.leaves),
        "sampled": sum(row.length for row in tree.nodes.values() if row.kind is NodeKind.SAMPLED),
        "targets": sum(row.length for row in tree.nodes.values() if tree.is_target(row.node)),
        "incomplete": int(tree.incomplete),
    }


def _stored(reader: StoreReader) -> tuple[int, int]:
    """Nodes and tokens of the store, each node once (a prefix may be in several segments)."""
    ids = [np.fromiter(reader.live.nodes, np.int64)]
    lengths = [np.fromiter((len(node.tokens) for node in reader.live.nodes.values()), np.int64)]
    for segment in reader.segments:
        ids.append(segment.column("nodes/id"))
        lengths.append(segment.column("nodes/length"))
        segment.forget()
    _, first = np.unique(np.concatenate(ids), return_index=True)
    return len(first), int(np.concatenate(lengths)[first].sum())


def _row(tree: Tree) -> dict[str, Any]:
    measures = _measure(tree)
    e, end = tree.execution, tree.end
    return {
        "execution": e.execution,
        "group": e.group,
        "index": e.index,
        "attempt": e.attempt,
        "reason": end.reason if end else None,
        "score": end.score if end else None,
        "valid": end.valid if end else None,
        "nodes": len(tree.nodes),
        "leaves": measures["leaves"],
        "calls": measures["calls"],
        "tokens": sum(row.length for row in tree.nodes.values()),
        "target_tokens": measures["targets"],
        "incomplete": tree.incomplete,
    }
