"""Reads one sealed segment (written by segment.py).

Invariants: what `Segment` returns equals the records that were appended; a file that was changed gives those or `Damaged`, never another
value (HDF5's checksums, sizes, row counts). Nothing but h5py is needed to read a segment; this module only turns columns back into
records. Nothing is opened before it is asked for; `forget` gives back the file and the tables that were read; tokens and texts
always come from the file. Not thread-safe.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from trees.catalogue import NO_DIGEST, Entry
from trees.codec import RESTORE, SCHEMA, Header
from trees.errors import Damaged, Missing, StoreError
from trees.ids import Ids
from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Role
from trees.segment import DESCRIPTIONS, OPEN, TABLES, TOKEN_DTYPES, segment_name, span
from trees.tree import Call, Columns, Tree, TreeNode, build

T = TypeVar("T")
HEADS = 256
"""Rows that are read together when executions or groups are listed."""
_SMALL_TABLES = {
    "nodes": ("id", "parent", "offset", "length", "kind", "role", "call", "execution"),
    "calls": ("id", "execution", "prompt", "sampled", "role", "fate", "finish", "difference", "digest"),
}
_CACHED = ("node_table", "call_table", "open_calls", "execution_ids", "group_ids", "_node_order", "_call_order", "_rows")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever HDF5 or a wrong value raises within is `Damaged`."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, IndexError, OverflowError, MemoryError) as error:
        if not path.exists():  # merged away under an open handle, which some network file systems don't keep
            raise Missing(f"{path} is missing", RESTORE) from error
        raise Damaged(f"{path} can't be read ({' '.join(str(error).split())})", RESTORE) from error


class Segment:
    """One sealed segment. Until `forget` it keeps the file open, so one that was merged away meanwhile can be read to the end."""

    def __init__(self, path: Path, entry: Entry | None = None) -> None:
        """Opens nothing. `entry`: what the catalogue says of it; None: nothing is known but the file."""
        self.path = path
        self.entry = entry
        self._file: h5py.File | None = None
        self._near: tuple[int, list[tuple[Execution, ExecutionEnd]]] = (-1, [])

    # -- the file -------------------------------------------------------------------------------------------------------------
    def open(self) -> h5py.File:
        """The file anew, for plain h5py. Missing, or Damaged if it can't be opened or has another size than the catalogue says."""
        try:
            size = self.path.stat().st_size
            if self.entry is not None and size != self.entry.bytes:
                raise Damaged(f"{self.path} has {size} bytes, {self.entry.bytes} were written", RESTORE)
            with reading(self.path):
                return h5py.File(self.path, "r", locking=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise Missing(f"{self.path} is missing", RESTORE) from error
            raise Damaged(f"{self.path} can't be opened ({error})", RESTORE) from error

    @property
    def file(self) -> h5py.File:
        """The file, kept open until `forget`."""
        if self._file is None:
            file = self.open()
            try:
                with reading(self.path):
                    schema = file.attrs.get("schema")
                    if schema != SCHEMA:
                        raise StoreError(f"{self.path} has schema {schema}, this program reads {SCHEMA}", "use the version that wrote it")
            except BaseException:
                file.close()
                raise
            self._file = file
        return self._file

    def forget(self) -> None:
        """Close the file and free the cached tables."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._near = (-1, [])
        for name in _CACHED:
            self.__dict__.pop(name, None)

    @cached_property
    def _rows(self) -> dict[str, int]:
        with reading(self.path):
            rows = {table: int(self.file.attrs[f"rows_{table}"]) for table in ("tokens", *TABLES)}
        if self.entry is not None and rows["tokens"] != self.entry.tokens:
            raise Damaged(f"{self.path}: {rows['tokens']} tokens where {self.entry.tokens} were written", RESTORE)
        return rows

    def rows(self, table: str) -> int:
        """Committed rows of `tokens`, `nodes`, `calls`, `executions` or `groups`."""
        return self._rows[table]

    def column(self, name: str, part: slice = slice(None)) -> NDArray[Any]:
        """Rows of one dataset. Damaged: it is not all there, or a checksum is wrong."""
        committed = self.rows(name.split("/")[0] if "/" in name else "tokens")
        with reading(self.path):
            dataset = self.file[name]
            if len(dataset) != committed:
                raise Damaged(f"{self.path}: /{name} has {len(dataset)} rows, {committed} were committed", RESTORE)
            values: NDArray[Any] = dataset[part]
        return values

    # -- executions and groups ------------------------------------------------------------------------------------------------
    @cached_property
    def execution_ids(self) -> NDArray[np.int64]:
        """Ids of its executions, ascending."""
        return self.column("executions/id")

    @cached_property
    def group_ids(self) -> NDArray[np.int64]:
        """Ids of its groups, ascending."""
        return self.column("groups/id")

    def heads(self, part: slice) -> list[tuple[Execution, ExecutionEnd]]:
        """Executions of these rows and how they ended."""
        names = ("id", "group", "index", "attempt", "score", "valid", "calls", "tokens", "seconds")
        numbers = [self.column(f"executions/{name}", part).tolist() for name in names]
        with reading(self.path):
            reasons, details = (_text(self.column(f"executions/{name}", part)) for name in ("reason", "detail"))
            rows = zip(*numbers, reasons, details, strict=True)
            return [
                (Execution(e, group, index, attempt), ExecutionEnd(e, reason, score, bool(valid), calls, tokens, seconds, detail))
                for e, group, index, attempt, score, valid, calls, tokens, seconds, reason, detail in rows
            ]

    def groups(self, part: slice) -> list[Group]:
        """Groups of these rows."""
        ids, sizes, versions, bursts = (self.column(f"groups/{name}", part).tolist() for name in ("id", "size", "version", "burst"))
        with reading(self.path):
            tasks = _text(self.column("groups/task", part))
            return [Group(*row) for row in zip(ids, tasks, sizes, versions, bursts, strict=True)]

    def all_heads(self, after: int = -1) -> Iterator[tuple[Execution, ExecutionEnd]]:
        """Executions with an id above `after`, ascending; a few rows are in memory at a time."""
        return _listed(self.execution_ids, self.heads, after)

    def all_groups(self, after: int = -1) -> Iterator[Group]:
        """Groups with an id above `after`, ascending, likewise."""
        return _listed(self.group_ids, self.groups, after)

    def head(self, execution: int) -> tuple[Execution, ExecutionEnd]:
        """One execution. KeyError: it is not here. Its neighbours are read with it, for whoever asks for them next."""
        row = row_of(self.execution_ids, execution)
        first = row - row % HEADS
        if self._near[0] != first:
            self._near = first, self.heads(slice(first, first + HEADS))
        return self._near[1][row - first]

    @cached_property
    def open_calls(self) -> frozenset[int]:
        """Executions with a call that has no end."""
        owners, fates = self.column("calls/execution"), self.column("calls/fate")
        return frozenset(np.unique(owners[fates == OPEN]).tolist())

    # -- nodes and calls ------------------------------------------------------------------------------------------------------
    @cached_property
    def node_table(self) -> dict[str, NDArray[Any]]:
        """The columns of /nodes but the hashes."""
        return {name: self.column(f"nodes/{name}") for name in _SMALL_TABLES["nodes"]}

    @cached_property
    def call_table(self) -> dict[str, NDArray[Any]]:
        """The columns of /calls."""
        return {name: self.column(f"calls/{name}") for name in _SMALL_TABLES["calls"]}

    @cached_property
    def _node_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _by(self.node_table["execution"])

    @cached_property
    def _call_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _by(self.call_table["execution"])

    def calls(self, execution: int) -> list[Call]:
        """The calls of an execution, ascending."""
        rows = _of(self._call_order, execution)
        table = {name: column[rows] for name, column in self.call_table.items()}
        with reading(self.path):
            return [
                _call(*row) for row in zip(*(table[name].tolist() for name in _SMALL_TABLES["calls"][:-1]), table["digest"], strict=True)
            ]

    def rows_of(self, nodes: Iterable[int]) -> NDArray[np.int64]:
        """Rows of /nodes with these ids and their ancestors, ascending. KeyError if one is not in this segment."""
        ids, parents = self.node_table["id"], self.node_table["parent"]
        wanted: set[int] = set()
        for node in nodes:
            while node >= 0:
                row = row_of(ids, node)
                if row in wanted:
                    break
                wanted.add(row)
                node = int(parents[row])
        return np.array(sorted(wanted), np.int64)

    def holds(self, node: int) -> bool:
        """Whether the node is in this segment."""
        ids = self.node_table["id"]
        row = int(np.searchsorted(ids, node))
        return row < len(ids) and int(ids[row]) == node

    def nodes(self, rows: NDArray[np.int64]) -> list[Node]:
        """Whole nodes of these rows."""
        table = {name: column[rows].tolist() for name, column in self.node_table.items()}
        spans = list(zip(table["offset"], table["length"], strict=True))
        columns = self._columns(sorted(spans))
        with reading(self.path):
            nodes = []
            for i, place in enumerate(spans):
                part, kind = columns[place], NodeKind(table["kind"][i])
                sampled = kind is NodeKind.SAMPLED
                columns_of = (part.tokens, part.logprobs if sampled else None, part.versions if sampled else None)
                node, parent, execution, call = (table[name][i] for name in ("id", "parent", "execution", "call"))
                nodes.append(Node(node, parent, execution, call, kind, Role(table["role"][i]), *columns_of))
            return nodes

    def _columns(self, spans: list[tuple[int, int]]) -> dict[tuple[int, int], Columns]:
        """The columns of each (offset, length); neighbours are read together."""
        runs: list[list[tuple[int, int]]] = []
        for place in spans:
            if place[0] < 0 or place[1] < 1 or sum(place) > self.rows("tokens"):
                raise Damaged(f"{self.path}: a node has tokens [{place[0]}, {sum(place)}) of {self.rows('tokens')}", RESTORE)
            if runs and sum(runs[-1][-1]) == place[0]:
                runs[-1].append(place)
            else:
                runs.append([place])
        columns: dict[tuple[int, int], Columns] = {}
        for run in runs:
            first, last = run[0][0], sum(run[-1])
            whole = Columns(*(self.column(name, slice(first, last)) for name in TOKEN_DTYPES))
            for offset, length in run:
                part = slice(offset - first, offset - first + length)
                columns[offset, length] = Columns(whole.tokens[part], whole.logprobs[part], whole.versions[part])
        return columns

    def tree(self, execution: int, *, tokens: bool = True) -> Tree:
        """The tree of an execution of this segment (KeyError: it is not here); `tokens` False: a skeleton."""
        begun, end = self.head(execution)
        calls = self.calls(execution)
        own = self.node_table["id"][_of(self._node_order, execution)]
        with reading(self.path):
            rows = self.rows_of([*own.tolist(), *(call.prompt for call in calls)])
            if tokens:
                return build(begun, end, self.nodes(rows), calls)
            return Tree(begun, end, self._skeleton(rows), {c.call: c for c in calls}, None)

    def _skeleton(self, rows: NDArray[np.int64]) -> dict[int, TreeNode]:
        table = {name: column[rows].tolist() for name, column in self.node_table.items()}
        nodes: dict[int, TreeNode] = {}
        offset = 0
        names = ("id", "parent", "execution", "call", "length", "kind", "role")
        for node, parent, execution, call, length, kind, role in zip(*(table[name] for name in names), strict=True):
            nodes[node] = TreeNode(node, parent, execution, call, NodeKind(kind), Role(role), offset, length)
            offset += length
        return nodes

    def without_checksums(self) -> list[str]:
        """Datasets that have none."""
        with reading(self.path):
            return [name for name in DESCRIPTIONS if not self.file[name].fletcher32]


def catalogued(directory: Path, header: Header) -> Header:
    """The header with a list of segments also where schema 1 gave only their number (what their bytes were is not known then)."""
    if not header.legacy:
        return header
    entries, executions, groups = [], Ids(), Ids()
    for number in range(1, header.legacy + 1):
        segment = Segment(directory / segment_name(number))
        entries.append(entry_of(segment, number))
        executions, groups = executions.union(segment.execution_ids.tolist()), groups.union(segment.group_ids.tolist())
        segment.forget()
    return replace(header, segments=tuple(entries), executions=executions, groups=groups, legacy=0)


def entry_of(segment: Segment, number: int, digest: str = NO_DIGEST) -> Entry:
    """What a catalogue says of a segment, from the file alone. StoreError if it can't be read."""
    spans = (span(segment.execution_ids), span(segment.group_ids), span(segment.column("nodes/id")))
    return Entry(number, segment.path.stat().st_size, digest, segment.rows("tokens"), *spans)


def row_of(ids: NDArray[np.int64], wanted: int) -> int:
    """The row of an id in an ascending column. KeyError if it is not there."""
    row = int(np.searchsorted(ids, wanted))
    if row == len(ids) or ids[row] != wanted:
        raise KeyError(wanted)
    return row


def _listed(ids: NDArray[np.int64], rows: Callable[[slice], list[T]], after: int) -> Iterator[T]:
    first = int(np.searchsorted(ids, after, side="right"))
    for at in range(first, len(ids), HEADS):
        yield from rows(slice(at, min(at + HEADS, len(ids))))


def _by(owners: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ordered by owner, and the owners in that order."""
    order = np.argsort(owners, kind="stable")
    return order, owners[order]


def _of(index: tuple[NDArray[np.int64], NDArray[np.int64]], owner: int) -> NDArray[np.int64]:
    order, owners = index
    return order[int(np.searchsorted(owners, owner)) : int(np.searchsorted(owners, owner, side="right"))]


def _text(values: NDArray[Any]) -> list[str]:
    return [bytes(value).decode() for value in values]


def _call(
    call: int, execution: int, prompt: int, sampled: int, role: int, fate: int, finish: bytes, difference: bytes, digest: NDArray[np.uint8]
) -> Call:
    end = None if fate == OPEN else CallEnd(call, execution, sampled, Fate(fate), finish.decode(), difference.decode())
    return Call.of(Intent(call, execution, prompt, Role(role), bytes(digest)), end)
