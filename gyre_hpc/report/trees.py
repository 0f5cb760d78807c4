"""`gyre trees ls|show|stats|verify` and the drawn tree of the report: thin over the `trees` package.

Everything but repair only reads the store, and works while the gateway writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.report.svg import TreeNode as Mark
from trees import stats
from trees.blocks import count_blocks
from trees.reader import locate
from trees.records import Fate, NodeKind
from trees.repair import repair
from trees.store import StoreError, StoreReader
from trees.tree import Tree
from trees.verify import verify

DRAWN = 60
"""Most nodes in a picture; of larger trees the first are shown."""


NEWEST = 200
"""Ended executions among which the one to draw is chosen."""


@dataclass(frozen=True)
class Drawing:
    """What the report shows of one tree."""

    nodes: tuple[Mark, ...]
    caption: str


@dataclass(frozen=True)
class Survey:
    """What the report tells of a run's trees; `missing`: a line for each thing that could not be read. `counts` is empty where it would be
    wrong."""

    counts: Mapping[str, Any] = field(default_factory=dict)
    drawing: Drawing | None = None
    missing: tuple[str, ...] = ()


def survey(folder: Path) -> Survey:
    """The trees of a run for its report, damaged ones too: then what is whole, and what is missing."""
    if not folder.is_dir():
        return Survey()
    try:
        return Survey(statistics(folder), draw_most_branched(folder))
    except GyreError as error:
        whole, drawing, told = _whole(folder)
        return Survey(whole, drawing, (error.line, *told))


def _whole(folder: Path) -> tuple[dict[str, Any], Drawing | None, list[str]]:
    """Of a damaged store: (how many executions can be read, the most branched of the last of them, what else there is to say)."""
    trees, unread, newest = 0, list[int](), deque[Tree](maxlen=NEWEST)
    try:
        with StoreReader(locate(folder)) as reader:
            for execution in reader.executions():
                try:
                    tree = reader.tree(execution, tokens=False)
                except StoreError:
                    unread.append(execution)
                    continue
                trees += 1
                if tree.end is not None:
                    newest.append(tree)
    except StoreError:  # nothing of it can be read, and why is said already
        return {}, None, []
    told = [f"{len(unread)} of {trees + len(unread)} executions can't be read: {_some(unread)}"] if unread else []
    return {"readable": trees}, _most_branched(newest), told


def _some(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


def statistics(folder: Path) -> dict[str, Any]:
    """Counts over a folder of trees (contract: executions, nodes, leaves, stored_tokens, expanded_tokens, ratio, bytes).

    Of imported recordings also token_exact (false); of traces unique_blocks and expanded_blocks, in blocks of the trace's size.
    """
    with user_errors():
        found = stats.stats(folder)
        with StoreReader(locate(folder)) as reader:
            provenance = reader.header.provenance if reader.header else {}
            if "token_exact" in provenance:
                found["token_exact"] = provenance["token_exact"]
            size = provenance.get("block_size")
            if size:
                found["unique_blocks"], found["expanded_blocks"] = count_blocks(reader, size)
        return found


def differences(folder: Path) -> list[dict[str, Any]]:
    """Of every execution: how its calls related to what was recorded."""
    with user_errors():
        return stats.differences(folder)


def verification(folder: Path) -> dict[str, Any]:
    """Reads every chunk. `problems` is empty when all is well."""
    with user_errors():
        return {"path": str(folder), "problems": verify(folder)}


def mending(folder: Path) -> dict[str, Any]:
    """Repairs. `done`: a line for each thing; `lost`: executions that are gone, `heads`: those of which only the end is left."""
    with user_errors():
        report = repair(folder)
        return {"path": str(folder), "done": report.done, "lost": report.lost, "heads": report.heads}


def list_executions(folder: Path) -> list[dict[str, Any]]:
    """One row an execution, in the order of their ids."""
    with user_errors():
        return stats.ls(folder)


def describe_execution(folder: Path, execution: str) -> dict[str, Any]:
    """One tree as nodes and calls, without its tokens, and an outline. Raises ConfigError for an unknown execution."""
    with user_errors(), StoreReader(locate(folder)) as reader:
        known = reader.executions()
        if not execution.isdecimal() or int(execution) not in known:
            span = f"{min(known)} to {max(known)}" if known else "none recorded yet"
            raise ConfigError(f"execution {execution} is not in {folder}", f"known ids: {span}; see `gyre trees ls`")
        return {**stats.show(folder, int(execution)), "outline": stats.outline(reader.tree(int(execution), tokens=False))}


def render_execution(found: dict[str, Any]) -> str:
    """The tree as indented lines."""
    return "\n".join(found["outline"])


@contextmanager
def user_errors() -> Iterator[None]:
    """The trees package knows nothing of ours: its errors become ours here."""
    try:
        yield
    except StoreError as error:
        raise GyreError(error.what, error.remedy) from error


def draw_most_branched(folder: Path) -> Drawing | None:
    """The ended execution with the most leaves among the newest 200 (ties: more nodes)."""
    with user_errors(), StoreReader(folder) as reader:
        return _most_branched([reader.tree(execution, tokens=False) for execution in deque(reader.ends(), maxlen=NEWEST)])


def _most_branched(trees: Collection[Tree]) -> Drawing | None:
    return draw(max(trees, key=lambda tree: (len(tree.leaves), len(tree.nodes)))) if trees else None


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
    caption = f"Execution {execution.execution} of group {execution.group}{score}: {len(tree.calls)} calls, {len(tree.leaves)} leaves"
    caption += f"{cut}. Width is tokens."
    return Drawing(tuple(marks), caption)
