"""The tables of an export, row by row: what trainers want (`paths`) and what lies below (`nodes`, `calls`, `executions`).

`paths` has a row for each selected path of a tree (trees/selection.py): a whole trajectory from its root, `targets` the tokens that this
row is to train. Invariants: over the rows of an execution every target stands in exactly one row (all of them unless `jmax` cuts the
choice short, which is then training's own, seeded), and weights x targets sum to one; an incomplete execution has no path. The other tables
have everything, each thing once an execution. Rows come in the order of execution ids; one tree and one row are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from gyre_hpc.exports.lineage import Lineages
from trees.export import as_dict
from trees.records import Group
from trees.selection import Path, all_paths, select_paths
from trees.store import StoreReader
from trees.tree import Tree

Row = dict[str, Any]


class Table(StrEnum):
    """What a row is."""

    PATHS = "paths"
    NODES = "nodes"
    CALLS = "calls"
    EXECUTIONS = "executions"


def rows_of(reader: StoreReader, table: Table, jmax: int | None, seed: int, lineages: Lineages) -> Iterator[Row]:
    """The rows of all executions. `jmax`: most paths of one, None: until every target is in one; `seed`: of the choice of paths."""
    groups = reader.groups()
    for execution in sorted(reader.executions()):
        yield from rows_of_tree(reader.tree(execution), groups, table, jmax, seed, lineages)


def rows_of_tree(tree: Tree, groups: Mapping[int, Group], table: Table, jmax: int | None, seed: int, lineages: Lineages) -> Iterator[Row]:
    """The rows of one execution."""
    whole = lineages.told(as_dict(tree, groups))
    nodes, calls = whole.pop("nodes"), whole.pop("calls")
    if table is Table.EXECUTIONS:
        counts = {"nodes": len(nodes), "calls": len(calls), "leaves": len(tree.leaves)}
        targets = sum(tree.nodes[row["node"]].length for row in nodes if row["target"])
        yield {**whole, **counts, "tokens": sum(row.length for row in tree.nodes.values()), "target_tokens": targets}
    elif table is Table.CALLS:
        yield from ({"execution": whole["execution"], **row} for row in calls)
    elif table is Table.NODES:
        same = {name: whole[name] for name in ("execution", "lineage", "fork")}
        yield from ({**same, "logprobs": None, "versions": None, **row} for row in nodes)
    else:
        chosen = all_paths(tree) if jmax is None else iter(select_paths(tree, jmax, seed))
        yield from ({**whole, **_path(tree, path)} for path in chosen)


def _path(tree: Tree, path: Path) -> Row:
    return {
        "path": path.index,
        "leaf": path.leaf,
        "role": tree.role_of(path.leaf).name.lower(),
        "weight": path.weight,
        "target_tokens": int(path.targets.sum()),
        "tokens": path.tokens,
        "targets": path.targets,
        "logprobs": path.logprobs,
        "versions": path.versions,
    }
