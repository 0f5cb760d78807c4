"""A store as JSON: one object an execution, whole and lossless; paths follow from the parents.

An object has `execution`, `group`, `index`, `attempt`, `task`, `size` (of the group), `version`, `burst`; `reason`, `score`, `valid` (null
while it lives); `incomplete`; `nodes` and `calls`, each a list by ascending id. A node: `node`, `parent` (-1: a root; else earlier in the
list), `kind`, `role`, `call`, `target` (trained on: sampled in a delivered call), `tokens`; and `logprobs`, `versions` if it was sampled.

Invariants: every token of an execution's tree stands there once, so every generated token once in the whole file (context that executions
share stands in each of them); floats round-trip. One execution is held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trees.records import Group, NodeKind
from trees.stats import call_rows
from trees.store import StoreReader
from trees.tree import Tree


def exported(reader: StoreReader) -> Iterator[dict[str, Any]]:
    """Every execution of the view, by id. Arrays are numpy's."""
    groups = reader.groups()
    for execution in reader.executions():
        tree = reader.tree(execution)
        yield as_dict(tree, groups)


def as_dict(tree: Tree, groups: Mapping[int, Group]) -> dict[str, Any]:
    """One execution. KeyError: its group is not among `groups`."""
    e, end, group = tree.execution, tree.end, groups[tree.execution.group]
    return {
        "execution": e.execution,
        "group": e.group,
        "index": e.index,
        "attempt": e.attempt,
        "task": group.task,
        "size": group.size,
        "version": group.version,
        "burst": group.burst,
        "reason": end.reason if end else None,
        "score": end.score if end else None,
        "valid": end.valid if end else None,
        "incomplete": tree.incomplete,
        "nodes": [_node(tree, node) for node in tree.nodes],
        "calls": call_rows(tree),
    }


def _node(tree: Tree, node: int) -> dict[str, Any]:
    if tree.columns is None:
        raise ValueError(f"tree of execution {tree.execution.execution} was read without tokens")
    row = tree.nodes[node]
    span = slice(row.offset, row.offset + row.length)
    found = {
        "node": node,
        "parent": row.parent,
        "kind": row.kind.name.lower(),
        "role": row.role.name.lower(),
        "call": row.call,
        "target": tree.is_target(node),
        "tokens": tree.columns.tokens[span],
    }
    if row.kind is NodeKind.SAMPLED:
        found |= {"logprobs": tree.columns.logprobs[span], "versions": tree.columns.versions[span]}
    return found
