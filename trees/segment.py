"""Writes sealed segments: immutable HDF5 files that explain themselves (docs/file-formats.md, "trees"). Read by sealed.py.

`segment-000001.h5`. Columns, not a group per node: `/tokens /logprobs /versions` are as long as all tokens of the file;
`/nodes /calls /executions /groups` hold one dataset per field. Each dataset describes itself in its attribute `description`.

Invariants: a segment holds whole executions and the ancestor closure of their nodes, so it can be read without any other file;
a prefix is stored once per file (parent pointer; `nodes/hash` is equal for equal content in all files). Node ids ascend and
a parent precedes its children; what only one execution has lies together. The image is built in memory and written with plain writes:
HDF5 on a full disk leaves files that look whole and a process that crashes at exit. Row counts are the last thing written into the image.

Every byte that a reader believes has a checksum: values by fletcher32, everything else by the HDF5 1.10 format (`libver` v110: object
headers and chunk indices with checksums; also a fifth of the older format's size in small files). No string is of variable length: those
lie in heaps without one. The datasets have their final size, so one chunk needs no index at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from trees.catalogue import Entry, digest_of
from trees.codec import SCHEMA
from trees.files import write_durably
from trees.forest import HASH_BYTES, Forest
from trees.records import Execution, ExecutionEnd, Fate, Group, Node, NodeKind, Role
from trees.tree import Call

OPEN = 255
"""Value of `calls/fate` when no end was recorded."""
SEGMENT = re.compile(r"segment-(\d{6,})\.h5")
TOKEN_CHUNK = 1 << 16
CHUNK_BYTES = 1 << 18
"""Of a table's chunk, about: wide texts have fewer rows in one."""

_ABOUT = "trajectory trees of gyre-hpc: sealed, immutable; row i of every dataset in a group is the same object"
_KIND = h5py.enum_dtype({kind.name: kind.value for kind in NodeKind}, "u1")
_ROLE = h5py.enum_dtype({role.name: role.value for role in Role}, "u1")
_FATE = h5py.enum_dtype({**{fate.name: fate.value for fate in Fate}, "OPEN": OPEN}, "u1")
DESCRIPTIONS = {
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
    "calls/difference": "how the request relates to the record: clean, retry, edit, compaction, sub-agent, side-query, drift, lost-call",
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
TOKEN_DTYPES = {"tokens": np.dtype("<i4"), "logprobs": np.dtype("<f4"), "versions": np.dtype("<i4")}
BLANK = {"logprobs": np.nan, "versions": -1}
"""What context has in these columns."""
CODES = {"nodes/kind": _KIND, "nodes/role": _ROLE, "calls/role": _ROLE, "calls/fate": _FATE}


class Content(NamedTuple):
    """What goes into one segment. `hashes` of its nodes."""

    executions: list[int]
    forest: Forest
    hashes: Mapping[int, bytes]


class Sheet(NamedTuple):
    """All columns of one segment to be.

    `tables`: one array for each name of DESCRIPTIONS with a slash. `tokens`: how many there are; `parts`: by name (tokens, logprobs,
    versions) their values, piece by piece, so that they need not be in memory together.
    """

    tables: Mapping[str, NDArray[Any]]
    tokens: int
    parts: Mapping[str, Iterable[NDArray[Any]]]


def segment_name(number: int) -> str:
    """The file name of segment `number` (from 1)."""
    return f"segment-{number:06d}.h5"


def write_segment(
    directory: Path, number: int, sheet: Sheet, provenance: Mapping[str, Any], fence: Callable[[], None] = lambda: None
) -> Entry:
    """Build the image and write it durably; returns what the catalogue says of it. OSError (ENOSPC) leaves no trace.

    `fence` raises if somebody else may write this directory meanwhile: the name may be that of a segment of theirs.
    """
    image = segment_image(number, sheet, provenance)
    fence()
    write_durably(directory / segment_name(number), [image])
    spans = [span(sheet.tables[f"{table}/id"]) for table in ("executions", "groups", "nodes")]
    return Entry(number, len(image), digest_of(image), sheet.tokens, *spans)


def span(ids: NDArray[Any]) -> tuple[int, int]:
    """(least, greatest) of ascending ids; (-1, -1) of none."""
    return (int(ids[0]), int(ids[-1])) if len(ids) else (-1, -1)


def segment_image(number: int, sheet: Sheet, provenance: Mapping[str, Any]) -> bytes:
    """The bytes of one segment file."""
    with h5py.File("segment", "w", driver="core", backing_store=False, block_size=1 << 20, libver=("v110", "v110")) as file:
        _attribute(file, "description", _ABOUT)
        h5py.h5o.set_comment(file["/"].id, _ABOUT.encode())
        file.attrs["schema"] = SCHEMA
        file.attrs["segment"] = number
        _attribute(file, "provenance", json.dumps(dict(provenance)))
        for name, parts in sheet.parts.items():
            _dataset(file, name, TOKEN_DTYPES[name], (sheet.tokens,), parts)
        for name, values in sheet.tables.items():
            _dataset(file, name, values.dtype, values.shape, [values])
        file.flush()
        file.attrs["rows_tokens"] = sheet.tokens
        for table in TABLES:
            file.attrs[f"rows_{table}"] = len(sheet.tables[f"{table}/id"])
        file.flush()
        return bytes(file.id.get_file_image())


def _attribute(where: h5py.HLObject, name: str, text: str) -> None:
    """UTF-8 of fixed length."""
    data = text.encode() or b" "
    where.attrs.create(name, data, dtype=h5py.string_dtype("utf-8", len(data)))


def _dataset(file: h5py.File, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterable[NDArray[Any]]) -> None:
    rows = TOKEN_CHUNK
    if "/" in name:
        rows = max(16, min(1 << 13, CHUNK_BYTES // (dtype.itemsize * int(np.prod(shape[1:])))))
    rows = max(1, min(shape[0], rows))
    dataset = file.create_dataset(
        name,
        shape,
        dtype,
        chunks=(rows, *shape[1:]),
        maxshape=shape if shape[0] else (None, *shape[1:]),
        compression="gzip",
        compression_opts=1,
        shuffle=True,
        fletcher32=True,
    )
    # Chunk by chunk: nothing else of the process runs while HDF5 compresses, so each piece must be short.
    for first, piece in _pieces(parts, rows):
        dataset[first : first + len(piece)] = piece
    # Twice: `h5dump -H` prints comments but no attribute values, and plain h5py shows attributes but no comments.
    _attribute(dataset, "description", DESCRIPTIONS[name])
    h5py.h5o.set_comment(dataset.id, DESCRIPTIONS[name].encode())


def _pieces(parts: Iterable[NDArray[Any]], rows: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """(first row, values), each of `rows` values but the last."""
    held: list[NDArray[Any]] = []
    first = count = 0
    for part in parts:
        at = 0
        while at < len(part):
            taken = part[at : at + rows - count]
            held.append(taken)
            at, count = at + len(taken), count + len(taken)
            if count == rows:
                yield first, np.concatenate(held) if len(held) > 1 else held[0]
                held, first, count = [], first + count, 0
    if held:
        yield first, np.concatenate(held)


def sheet_of(content: Content) -> Sheet:
    """The columns of whole executions; their tokens lie execution by execution."""
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
    tables = {**node_columns(nodes, offsets, content.hashes), **call_columns(calls)}
    tables |= {**execution_columns(executions, [forest.ends[e.execution] for e in executions]), **_group_columns(groups)}
    return Sheet(tables, end, {name: _column(order, name) for name in TOKEN_DTYPES})


def _column(nodes: list[Node], name: str) -> Iterator[NDArray[Any]]:
    for node in nodes:
        values = getattr(node, name)
        yield np.full(len(node.tokens), BLANK[name], TOKEN_DTYPES[name]) if values is None else values


def node_columns(nodes: list[Node], offsets: Mapping[int, int], hashes: Mapping[int, bytes]) -> dict[str, NDArray[Any]]:
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


def call_columns(calls: list[Call]) -> dict[str, NDArray[Any]]:
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


def execution_columns(executions: list[Execution], ends: list[ExecutionEnd]) -> dict[str, NDArray[Any]]:
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
