"""Reads sealed segments (written by segment.py).

Invariant: what `Segment` returns equals the records that were appended. Nothing but h5py is needed to read a segment; this module only
turns columns back into records. The tables of nodes and calls are read when first asked for; tokens always come from the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from trees.codec import SCHEMA
from trees.errors import Damaged, StoreError
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.segment import OPEN, TABLES, segment_name
from trees.tree import Call, Columns, Tree, TreeNode, build


class Segment:
    """Reads one sealed segment. Opens the file for each question: no handle is kept, no lock is taken (it never changes)."""

    def __init__(self, path: Path) -> None:
        """StoreError if it is no segment of our schema. That all committed rows are there is checked table by table, when one is read."""
        self.path = path
        with self.open() as file:
            if file.attrs.get("schema") != SCHEMA:
                raise StoreError(
                    f"{path} has schema {file.attrs.get('schema')}, this program reads {SCHEMA}", "use the version that wrote it"
                )
            self.rows = {table: int(file.attrs.get(f"rows_{table}", -1)) for table in ("tokens", *TABLES)}
            self.groups = _read_groups(file)
            self.executions, self.ends = _read_executions(file)
            self.open_calls = _open_calls(file)
        self._need("groups", len(self.groups))
        self._need("executions", len(self.executions))

    def open(self) -> h5py.File:
        """The file, for plain h5py. StoreError if it can't be opened."""
        try:
            return h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise Damaged(f"{self.path} can't be opened ({error})", "restore this file from a copy") from error

    @cached_property
    def node_table(self) -> dict[str, NDArray[Any]]:
        """The columns of /nodes."""
        with self.open() as file:
            table = {name: file["nodes"][name][:] for name in file["nodes"]}
        for column in table.values():
            self._need("nodes", len(column))
        return table

    @cached_property
    def calls(self) -> list[Call]:
        """All calls of the segment."""
        with self.open() as file:
            calls = _read_calls(file)
        self._need("calls", len(calls))
        return calls

    @cached_property
    def _calls_of(self) -> dict[int, list[Call]]:
        calls: dict[int, list[Call]] = {execution: [] for execution in self.executions}
        for call in self.calls:
            calls[call.execution].append(call)
        return calls

    def _need(self, table: str, rows: int) -> None:
        if rows != self.rows[table]:
            raise Damaged(f"{self.path}: {rows} rows of {table} where {self.rows[table]} were committed", "restore this file from a copy")

    def forget(self) -> None:
        """Free the cached tables."""
        for name in ("node_table", "calls", "_calls_of"):
            self.__dict__.pop(name, None)

    def rows_of(self, nodes: Iterable[int]) -> NDArray[np.int64]:
        """Rows of /nodes with these ids and their ancestors, ascending. KeyError if one is not in this segment."""
        ids, parents = self.node_table["id"], self.node_table["parent"]
        wanted: set[int] = set()
        for node in nodes:
            while node >= 0:
                row = int(np.searchsorted(ids, node))
                if row == len(ids) or ids[row] != node:
                    raise KeyError(node)
                if row in wanted:
                    break
                wanted.add(row)
                node = int(parents[row])
        return np.array(sorted(wanted), np.int64)

    def holds(self, node: int) -> bool:
        """Whether the node is in this segment."""
        row = int(np.searchsorted(self.node_table["id"], node))
        return row < len(self.node_table["id"]) and int(self.node_table["id"][row]) == node

    def nodes(self, rows: NDArray[np.int64]) -> list[Node]:
        """Whole nodes of these rows."""
        table = self.node_table
        spans = {int(row): (int(table["offset"][row]), int(table["length"][row])) for row in rows}
        columns = self._columns(sorted(spans.values()))
        nodes = []
        for row, span in spans.items():
            part = columns[span[0]] if span[1] else Columns.of([])
            sampled = NodeKind(table["kind"][row]) is NodeKind.SAMPLED
            nodes.append(
                Node(
                    node=int(table["id"][row]),
                    parent=int(table["parent"][row]),
                    execution=int(table["execution"][row]),
                    call=int(table["call"][row]),
                    kind=NodeKind(table["kind"][row]),
                    role=Role(table["role"][row]),
                    tokens=part.tokens,
                    logprobs=part.logprobs if sampled else None,
                    versions=part.versions if sampled else None,
                )
            )
        return nodes

    def _columns(self, spans: list[tuple[int, int]]) -> dict[int, Columns]:
        """The columns of each (offset, length), by offset; neighbours are read together."""
        runs: list[list[tuple[int, int]]] = []
        for span in spans:
            if runs and sum(runs[-1][-1]) == span[0]:
                runs[-1].append(span)
            elif span[1]:
                runs.append([span])
        columns: dict[int, Columns] = {}
        with self.open() as file:
            for run in runs:
                first, last = run[0][0], sum(run[-1])
                self._need("tokens", max(last, len(file["tokens"])))
                whole = Columns(file["tokens"][first:last], file["logprobs"][first:last], file["versions"][first:last])
                for offset, length in run:
                    part = slice(offset - first, offset - first + length)
                    if length:
                        columns[offset] = Columns(whole.tokens[part], whole.logprobs[part], whole.versions[part])
        return columns

    def tree(self, execution: int, *, tokens: bool = True) -> Tree:
        """The tree of an execution of this segment; `tokens` False: a skeleton."""
        calls = self._calls_of[execution]
        own = self.node_table["id"][self.node_table["execution"] == execution]
        rows = self.rows_of([*map(int, own), *(call.prompt for call in calls)])
        if tokens:
            return build(self.executions[execution], self.ends[execution], self.nodes(rows), calls)
        return Tree(self.executions[execution], self.ends[execution], self._skeleton(rows), {c.call: c for c in calls}, None)

    def _skeleton(self, rows: NDArray[np.int64]) -> dict[int, TreeNode]:
        table = self.node_table
        nodes: dict[int, TreeNode] = {}
        offset = 0
        for row in rows:
            node, parent, execution, call, length = (int(table[k][row]) for k in ("id", "parent", "execution", "call", "length"))
            nodes[node] = TreeNode(node, parent, execution, call, NodeKind(table["kind"][row]), Role(table["role"][row]), offset, length)
            offset += length
        return nodes


def counted_segments(directory: Path, count: int, known: Sequence[Segment] = ()) -> list[Segment]:
    """Segments 1..`count`, those `known` not read again. StoreError if one is missing or damaged."""
    return [*known[:count], *(Segment(directory / segment_name(n)) for n in range(len(known) + 1, count + 1))]


def _text(values: NDArray[Any]) -> list[str]:
    return [bytes(value).decode() for value in values]


def _read_groups(file: h5py.File) -> dict[int, Group]:
    t = file["groups"]
    columns = (t["id"][:].tolist(), _text(t["task"][:]), t["size"][:].tolist(), t["version"][:].tolist(), t["burst"][:].tolist())
    return {row[0]: Group(*row) for row in zip(*columns, strict=True)}


def _read_executions(file: h5py.File) -> tuple[dict[int, Execution], dict[int, ExecutionEnd]]:
    t = file["executions"]
    ids = t["id"][:].tolist()
    begun = zip(ids, t["group"][:].tolist(), t["index"][:].tolist(), t["attempt"][:].tolist(), strict=True)
    numbers = (t["calls"][:].tolist(), t["tokens"][:].tolist(), t["seconds"][:].tolist())
    ends = zip(
        ids,
        _text(t["reason"][:]),
        t["score"][:].tolist(),
        t["valid"][:].tolist(),
        *numbers,
        _text(t["detail"][:]),
        strict=True,
    )
    return {row[0]: Execution(*row) for row in begun}, {row[0]: ExecutionEnd(*row) for row in ends}


def _read_calls(file: h5py.File) -> list[Call]:
    t = file["calls"]
    ints = [t[name][:].tolist() for name in ("id", "execution", "prompt", "sampled", "role", "fate")]
    texts = (_text(t["finish"][:]), _text(t["difference"][:]), [bytes(digest) for digest in t["digest"][:]])
    calls = []
    for call, execution, prompt, sampled, role, fate, finish, difference, digest in zip(*ints, *texts, strict=True):
        end = None if fate == OPEN else CallEnd(call, execution, sampled, Fate(fate), finish, difference)
        calls.append(Call.of(Intent(call, execution, prompt, Role(role), digest), end))
    return calls


def _open_calls(file: h5py.File) -> dict[int, int]:
    """Calls without an end, by execution."""
    executions, counts = np.unique(file["calls/execution"][:][file["calls/fate"][:] == OPEN], return_counts=True)
    return dict(zip(executions.tolist(), counts.tolist(), strict=True))
