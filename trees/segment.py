"""Sealed segments: immutable HDF5 files that explain themselves (contract: docs/architecture.md, "Storage").

`segment-000001.h5`, numbered from 1 without gaps. Columns, not a group per node: `/tokens /logprobs /versions` are as long as all tokens of
the file; `/nodes /calls /executions /groups` hold one dataset per field. Each dataset describes itself in its attribute `description`.

Invariants: a segment holds whole executions and the ancestor closure of their nodes, so it can be read without any other file;
a prefix is stored once per file (parent pointer; `nodes/hash` is equal for equal content in all files). Node ids ascend and
a parent precedes its children; the tokens of one execution lie together. The image is built in memory and written with plain writes:
HDF5 on a full disk leaves files that look whole and a process that crashes at exit. Row counts are the last thing written into the image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from trees.codec import SCHEMA
from trees.errors import StoreError
from trees.files import write_durably
from trees.forest import HASH_BYTES, Forest
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.tree import Call, Columns, Tree, TreeNode, build

OPEN = 255
"""Value of `calls/fate` when no end was recorded."""
SEGMENT = re.compile(r"segment-(\d{6,})\.h5")
TOKEN_CHUNK = 1 << 16
ROW_CHUNK = 1 << 13

_ABOUT = "trajectory trees of gyre-hpc: sealed, immutable; row i of every dataset in a group is the same object"
_KIND = h5py.enum_dtype({kind.name: kind.value for kind in NodeKind}, "u1")
_ROLE = h5py.enum_dtype({role.name: role.value for role in Role}, "u1")
_FATE = h5py.enum_dtype({**{fate.name: fate.value for fate in Fate}, "OPEN": OPEN}, "u1")
_DESCRIPTIONS = {
    "tokens": "token ids of all nodes; a node's are at [offset, offset + length) of /nodes",
    "logprobs": "behaviour log-probability in nats of each sampled token, temperature applied, before top-p/top-k; NaN for context",
    "versions": "weight version that sampled each token; -1 for context",
    "nodes/id": "node id, ascending; unique in the whole store",
    "nodes/parent": "id of the node before it, in this file; -1: a root",
    "nodes/offset": "first token of the node in /tokens, /logprobs, /versions",
    "nodes/length": "number of tokens",
    "nodes/kind": "CONTEXT: system, user, tool or harness text, never a target; SAMPLED: drawn by the policy",
    "nodes/role": "conversation of the call that brought the node",
    "nodes/call": "call that brought the node; -1: none",
    "nodes/execution": "execution that appended the node first; context is shared by others",
    "nodes/hash": "BLAKE2b-128 of (hash of the parent or 16 zero bytes, kind as u1, tokens as little-endian int32)",
    "calls/id": "call id, ascending; unique in the whole store",
    "calls/execution": "execution that made the call",
    "calls/prompt": "node at which the prompt ends",
    "calls/sampled": "node that was sampled; -1: none",
    "calls/role": "conversation that the call belongs to; lower values train first",
    "calls/fate": "what became of the call (OPEN: no end was recorded); only DELIVERED calls are trained on",
    "calls/finish": "why sampling ended: stop, length, fault, cancelled",
    "calls/difference": "how the request related to what was recorded: clean, retry, edit, compaction, sub-agent, side-query, drift",
    "calls/digest": "16 bytes of the hash of the request's body; retries are equal",
    "executions/id": "execution id, ascending; one attempt at one task",
    "executions/group": "group of the execution",
    "executions/index": "place in the group, from 0",
    "executions/attempt": "attempts at the same (group, index) before this one",
    "executions/reason": "why the execution ended",
    "executions/score": "score in [0, 1]",
    "executions/valid": "whether it counts in training and in the group's baseline",
    "executions/calls": "model calls made, as reported at the end",
    "executions/tokens": "tokens sampled, as reported at the end",
    "executions/seconds": "duration in seconds",
    "executions/detail": "remarks",
    "groups/id": "group id, ascending",
    "groups/task": "path or name of the task",
    "groups/size": "executions in the group",
    "groups/version": "weight version at dispatch",
    "groups/burst": "burst of the dispatch",
}
TABLES = ("nodes", "calls", "executions", "groups")


class Content(NamedTuple):
    """What goes into one segment. `hashes` of its nodes."""

    executions: list[int]
    forest: Forest
    hashes: Mapping[int, bytes]


def segment_name(number: int) -> str:
    """The file name of segment `number` (from 1)."""
    return f"segment-{number:06d}.h5"


def counted_segments(directory: Path, count: int, known: Sequence[Segment] = ()) -> list[Segment]:
    """Segments 1..`count`, those `known` not read again. StoreError if one is missing or damaged."""
    return [*known[:count], *(Segment(directory / segment_name(n)) for n in range(len(known) + 1, count + 1))]


def write_segment(path: Path, number: int, content: Content, provenance: Mapping[str, Any]) -> None:
    """Build the image and write it durably under `path`. OSError (ENOSPC) leaves no trace."""
    write_durably(path, [segment_image(number, content, provenance)])


def segment_image(number: int, content: Content, provenance: Mapping[str, Any]) -> bytes:
    """The bytes of one segment file."""
    tables, order = _tables(content)
    columns = Columns.of(order)
    block = 1 << 20
    with h5py.File("segment", "w", driver="core", backing_store=False, block_size=block, libver=("earliest", "v110")) as file:
        file.attrs["description"] = _ABOUT
        h5py.h5o.set_comment(file["/"].id, _ABOUT.encode())
        file.attrs["schema"] = SCHEMA
        file.attrs["segment"] = number
        file.attrs["provenance"] = json.dumps(dict(provenance))
        for name in ("tokens", "logprobs", "versions"):
            _dataset(file, name, getattr(columns, name), TOKEN_CHUNK)
        for name, values in tables.items():
            _dataset(file, name, values, ROW_CHUNK)
        file.flush()
        file.attrs["rows_tokens"] = len(columns.tokens)
        for table in TABLES:
            file.attrs[f"rows_{table}"] = len(tables[f"{table}/id"])
        file.flush()
        return bytes(file.id.get_file_image())


def _dataset(file: h5py.File, name: str, values: NDArray[Any], chunk: int) -> None:
    chunks = (max(1, min(len(values), chunk)), *values.shape[1:])
    dataset = file.create_dataset(
        name,
        data=values,
        chunks=chunks,
        maxshape=(None, *values.shape[1:]),
        compression="gzip",
        compression_opts=1,
        shuffle=True,
        fletcher32=True,
    )
    # Twice: `h5dump -H` prints comments but no attribute values, and plain h5py shows attributes but no comments.
    dataset.attrs["description"] = _DESCRIPTIONS[name]
    h5py.h5o.set_comment(dataset.id, _DESCRIPTIONS[name].encode())


def _tables(content: Content) -> tuple[dict[str, NDArray[Any]], list[Node]]:
    """All tables, and the nodes in the order in which their tokens are laid out: execution by execution."""
    forest = content.forest
    offsets: dict[int, int] = {}
    order: list[Node] = []
    end = 0
    for execution in sorted(content.executions):
        for node in forest.closure(execution):
            if node not in offsets:
                offsets[node] = end
                order.append(forest.nodes[node])
                end += len(forest.nodes[node].tokens)
    nodes = [forest.nodes[node] for node in sorted(offsets)]
    executions = [forest.executions[e] for e in sorted(content.executions)]
    groups = [forest.groups[g] for g in sorted({e.group for e in executions})]
    calls = sorted((call for e in executions for call in forest.calls(e.execution)), key=lambda call: call.call)
    tables = {**_node_columns(nodes, offsets, content.hashes), **_call_columns(calls)}
    tables |= {**_execution_columns(executions, [forest.ends[e.execution] for e in executions]), **_group_columns(groups)}
    return tables, order


def _node_columns(nodes: list[Node], offsets: Mapping[int, int], hashes: Mapping[int, bytes]) -> dict[str, NDArray[Any]]:
    return {
        "nodes/id": np.array([n.node for n in nodes], "<i8"),
        "nodes/parent": np.array([n.parent for n in nodes], "<i8"),
        "nodes/offset": np.array([offsets[n.node] for n in nodes], "<i8"),
        "nodes/length": np.array([len(n.tokens) for n in nodes], "<i8"),
        "nodes/kind": np.array([n.kind for n in nodes], _KIND),
        "nodes/role": np.array([n.role for n in nodes], _ROLE),
        "nodes/call": np.array([n.call for n in nodes], "<i8"),
        "nodes/execution": np.array([n.execution for n in nodes], "<i8"),
        "nodes/hash": _bytes([hashes[n.node] for n in nodes]),
    }


def _call_columns(calls: list[Call]) -> dict[str, NDArray[Any]]:
    return {
        "calls/id": np.array([c.call for c in calls], "<i8"),
        "calls/execution": np.array([c.execution for c in calls], "<i8"),
        "calls/prompt": np.array([c.prompt for c in calls], "<i8"),
        "calls/sampled": np.array([c.sampled for c in calls], "<i8"),
        "calls/role": np.array([c.role for c in calls], _ROLE),
        "calls/fate": np.array([OPEN if c.fate is None else c.fate for c in calls], _FATE),
        "calls/finish": _strings([c.finish for c in calls]),
        "calls/difference": _strings([c.difference for c in calls]),
        "calls/digest": _bytes([c.digest for c in calls]),
    }


def _execution_columns(executions: list[Execution], ends: list[ExecutionEnd]) -> dict[str, NDArray[Any]]:
    return {
        "executions/id": np.array([e.execution for e in executions], "<i8"),
        "executions/group": np.array([e.group for e in executions], "<i8"),
        "executions/index": np.array([e.index for e in executions], "<i8"),
        "executions/attempt": np.array([e.attempt for e in executions], "<i8"),
        "executions/reason": _strings([e.reason for e in ends]),
        "executions/score": np.array([e.score for e in ends], "<f8"),
        "executions/valid": np.array([e.valid for e in ends], bool),
        "executions/calls": np.array([e.calls for e in ends], "<i8"),
        "executions/tokens": np.array([e.tokens for e in ends], "<i8"),
        "executions/seconds": np.array([e.seconds for e in ends], "<f8"),
        "executions/detail": _strings([e.detail for e in ends]),
    }


def _group_columns(groups: list[Group]) -> dict[str, NDArray[Any]]:
    return {
        "groups/id": np.array([g.group for g in groups], "<i8"),
        "groups/task": _strings([g.task for g in groups]),
        "groups/size": np.array([g.size for g in groups], "<i8"),
        "groups/version": np.array([g.version for g in groups], "<i8"),
        "groups/burst": np.array([g.burst for g in groups], "<i8"),
    }


def _strings(values: list[str]) -> NDArray[Any]:
    """UTF-8 of fixed width: compressed and checksummed like the rest, which variable-length strings are not."""
    encoded = [value.encode() for value in values]
    width = max([1, *map(len, encoded)])
    return np.array(encoded, h5py.string_dtype("utf-8", width))


def _bytes(values: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, HASH_BYTES)


class Segment:
    """Reads one sealed segment. Opens the file for each question: no handle is kept, no lock is taken (it never changes)."""

    def __init__(self, path: Path) -> None:
        """StoreError if it is no segment of our schema, or not all rows of it were committed."""
        self.path = path
        with self.open() as file:
            if file.attrs.get("schema") != SCHEMA:
                raise StoreError(
                    f"{path} has schema {file.attrs.get('schema')}, this program reads {SCHEMA}", "use the version that wrote it"
                )
            self.rows = {table: int(file.attrs.get(f"rows_{table}", -1)) for table in ("tokens", *TABLES)}
            for name in _DESCRIPTIONS:
                if name not in file or len(file[name]) != self.rows[_table_of(name)]:
                    raise StoreError(f"{path}: /{name} does not hold the rows that were committed", "restore this file from a copy")
            self.groups = _read_groups(file)
            self.executions, self.ends = _read_executions(file)
            self.open_calls = _open_calls(file)

    def open(self) -> h5py.File:
        """The file, for plain h5py. StoreError if it can't be opened."""
        try:
            return h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise StoreError(f"{self.path} can't be opened ({error})", "restore this file from a copy") from error

    @cached_property
    def node_table(self) -> dict[str, NDArray[Any]]:
        """The columns of /nodes."""
        with self.open() as file:
            return {name: file["nodes"][name][:] for name in file["nodes"]}

    @cached_property
    def calls(self) -> list[Call]:
        """All calls of the segment."""
        with self.open() as file:
            return _read_calls(file)

    @cached_property
    def _calls_of(self) -> dict[int, list[Call]]:
        calls: dict[int, list[Call]] = {execution: [] for execution in self.executions}
        for call in self.calls:
            calls[call.execution].append(call)
        return calls

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


def _table_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else "tokens"


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
