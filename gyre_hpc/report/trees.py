"""`gyre trees ls|show|stats|verify` and the drawn tree of the report: thin over the `trees` package.

Everything reads; all of it works while the gateway writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_hpc.errors import ConfigError
from gyre_hpc.report.svg import TreeNode as Mark
from trees.records import Fate, NodeKind
from trees.stats import store_stats
from trees.store import StoreReader
from trees.tree import Tree
from trees.verify import verify_store

DRAWN = 60
"""Most nodes in a picture; of larger trees the first are shown."""


@dataclass(frozen=True)
class Drawing:
    """What the report shows of one tree."""

    nodes: tuple[Mark, ...]
    caption: str


def statistics(folder: Path) -> dict[str, Any]:
    """Counts over a folder of trees (contract: executions, nodes, leaves, stored_tokens, expanded_tokens, ratio, bytes)."""
    return dict(store_stats(folder))


def verification(folder: Path) -> dict[str, Any]:
    """Reads every chunk. `problems` is empty when all is well."""
    problems = [str(problem) for problem in verify_store(folder)]
    return {
        "path": str(folder),
        **{key: value for key, value in store_stats(folder).items() if key in ("executions", "nodes", "bytes")},
        "problems": problems,
    }


def list_executions(folder: Path) -> list[dict[str, Any]]:
    """One row an execution, in the order of their ids."""
    reader = StoreReader(folder)
    reader.refresh()
    ends = reader.ends()
    rows = []
    for execution in reader.executions().values():
        end = ends.get(execution.execution)
        rows.append(
            {
                "execution": execution.execution,
                "group": execution.group,
                "index": execution.index,
                "attempt": execution.attempt,
                "reason": end.reason if end else "live",
                "score": end.score if end else None,
                "valid": end.valid if end else None,
                "calls": end.calls if end else None,
                "tokens": end.tokens if end else None,
            }
        )
    return rows


def describe_execution(folder: Path, execution: str) -> dict[str, Any]:
    """One tree as nodes and calls, without its tokens. Raises ConfigError for an unknown execution."""
    reader = StoreReader(folder)
    reader.refresh()
    known = reader.executions()
    if not execution.isdigit() or int(execution) not in known:
        span = f"{min(known)} to {max(known)}" if known else "none recorded yet"
        raise ConfigError(f"execution {execution} is not in {folder}", f"known ids: {span}; see `gyre trees ls`")
    tree = reader.tree(int(execution))
    nodes = [
        {
            "node": node.node,
            "parent": node.parent,
            "kind": node.kind.name.lower(),
            "role": node.role.name.lower().replace("_", "-"),
            "call": node.call,
            "tokens": node.length,
            "target": tree.is_target(node.node),
        }
        for node in tree.nodes.values()
    ]
    calls = [
        {
            "call": call.call,
            "prompt": call.prompt,
            "sampled": call.sampled,
            "fate": call.fate.name.lower() if call.fate is not None else "no end recorded",
            "finish": call.finish,
            "difference": call.difference,
        }
        for call in tree.calls.values()
    ]
    return {"execution": int(execution), "leaves": len(tree.leaves), "incomplete": tree.incomplete, "nodes": nodes, "calls": calls}


def render_execution(found: dict[str, Any]) -> str:
    """The tree as indented lines."""
    below: dict[int, list[dict[str, Any]]] = {}
    for node in found["nodes"]:
        below.setdefault(node["parent"], []).append(node)
    calls = {call["call"]: call for call in found["calls"]}
    lines = [f"execution {found['execution']}: {len(found['nodes'])} nodes, {found['leaves']} leaves, {len(found['calls'])} calls"]
    stack = [(node, 0) for node in reversed(below.get(-1, []))]
    while stack:
        node, depth = stack.pop()
        children = below.get(node["node"], [])
        call = calls.get(node["call"])
        tail = f" call {node['call']} {call['fate']} {call['finish']} ({call['difference']})" if call and node["kind"] == "sampled" else ""
        lines.append(f"{'  ' * depth}{node['kind']} {node['tokens']} tokens, node {node['node']}, {node['role']}{tail}")
        # a chain keeps its depth, only a fork goes one in: long conversations stay readable
        stack.extend((child, depth + (len(children) > 1)) for child in reversed(children))
    return "\n".join(lines)


def draw_most_branched(folder: Path) -> Drawing | None:
    """The ended execution with the most leaves among the newest 200 (ties: more nodes)."""
    reader = StoreReader(folder)
    reader.refresh()
    newest = sorted(reader.ends())[-200:]
    if not newest:
        return None
    skeletons = [reader.tree(execution, tokens=False) for execution in newest]
    return draw(max(skeletons, key=lambda tree: (len(tree.leaves), len(tree.nodes))))


def draw(tree: Tree) -> Drawing:
    """A picture of one tree."""
    marks: list[Mark] = []
    place: dict[int, int] = {-1: -1}
    for node in tree.nodes.values():
        if len(marks) >= DRAWN:
            break
        call = tree.calls.get(node.call)
        sampled = node.kind is NodeKind.SAMPLED
        fate = call.fate if call else None
        colour = "grey" if not sampled else "blue" if fate is Fate.DELIVERED else "pink"
        role = node.role.name.lower().replace("_", "-")
        difference = f", {call.difference}" if call and sampled else ""
        title = f"{'sampled' if sampled else 'context'}: {node.length} tokens, {role}{difference}"
        place[node.node] = len(marks)
        marks.append(Mark(place[node.parent], node.length, colour, title))
    execution, end = tree.execution, tree.end
    score = f", score {end.score:.2f}, {end.reason}" if end else ""
    cut = f" (the first {DRAWN} of {len(tree.nodes)} nodes)" if len(tree.nodes) > DRAWN else ""
    caption = f"Execution {execution.execution} of group {execution.group}{score}: {len(tree.calls)} calls, {len(tree.leaves)} leaves{cut}. Width is tokens."
    return Drawing(tuple(marks), caption)
