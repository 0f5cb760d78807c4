"""Records in memory, indexed: what a journal says, for its writer and its readers.

Invariants: `apply` twice is `apply` once (a rotated journal repeats what lives on); the closure of an execution is every node that it
appended or prompted from, and their ancestors, so it holds shared context of other executions and never their sampled tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from trees.records import Boundary, CallEnd, Execution, ExecutionEnd, Group, Intent, Node, NodeKind, Record
from trees.tree import Call, Tree, build

HASH_BYTES = 16
_NO_HASH = bytes(HASH_BYTES)


def content_hash(parent: bytes, kind: NodeKind, tokens: NDArray[np.int32]) -> bytes:
    """BLAKE2b-128 of (parent's hash or 16 zeros, kind u8, tokens int32 little-endian): equal paths have equal hashes in every file."""
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES)
    digest.update(bytes([kind]))
    digest.update(np.ascontiguousarray(tokens, "<i4").data)
    return digest.digest()


class Forest:
    """Every record of one journal."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.executions: dict[int, Execution] = {}
        self.ends: dict[int, ExecutionEnd] = {}
        self.nodes: dict[int, Node] = {}
        self.intents: dict[int, Intent] = {}
        self.call_ends: dict[int, CallEnd] = {}
        self.open_calls: dict[int, set[int]] = {}
        """Calls without an end, by execution."""
        self.boundaries: dict[int, dict[tuple[int, int], Boundary]] = {}
        """By execution, then by call and node, in the order in which they were appended."""
        self._nodes_of: dict[int, list[int]] = {}
        self._calls_of: dict[int, list[int]] = {}

    def apply(self, record: Record) -> None:
        """Take one record in."""
        match record:
            case Node():
                if record.node not in self.nodes:
                    self.nodes[record.node] = record
                    self._nodes_of.setdefault(record.execution, []).append(record.node)
            case Intent():
                if record.call not in self.intents:
                    self.intents[record.call] = record
                    self._calls_of.setdefault(record.execution, []).append(record.call)
                    self.open_calls.setdefault(record.execution, set()).add(record.call)
            case CallEnd():
                self.call_ends[record.call] = record
                self.open_calls.get(record.execution, set()).discard(record.call)
            case Group():
                self.groups[record.group] = record
            case Execution():
                self.executions[record.execution] = record
            case ExecutionEnd():
                self.ends[record.execution] = record
            case Boundary():
                self.boundaries.setdefault(record.execution, {})[record.call, record.node] = record

    def snapshot(self) -> Forest:
        """As it is now, whatever is applied to this one later. Takes a few milliseconds for a hundred thousand records."""
        copy = Forest()
        for name, table in self.__dict__.items():
            copied = table.copy()
            if name in ("_nodes_of", "_calls_of", "open_calls", "boundaries"):
                copied = {execution: inner.copy() for execution, inner in table.items()}
            setattr(copy, name, copied)
        return copy

    def calls(self, execution: int) -> list[Call]:
        """The calls of an execution, ascending."""
        return [Call.of(self.intents[call], self.call_ends.get(call)) for call in self._calls_of.get(execution, ())]

    def closure(self, execution: int) -> list[int]:
        """The nodes of an execution's tree, ascending."""
        wanted: set[int] = set()
        starts = [*self._nodes_of.get(execution, ()), *(self.intents[call].prompt for call in self._calls_of.get(execution, ()))]
        for node in starts:
            while node >= 0 and node not in wanted:
                wanted.add(node)
                node = self.nodes[node].parent
        return sorted(wanted)

    def tree(self, execution: int) -> Tree:
        """The tree of an execution of this journal."""
        nodes = [self.nodes[node] for node in self.closure(execution)]
        return build(self.executions[execution], self.ends.get(execution), nodes, self.calls(execution))

    def of_executions(self, executions: Iterable[int], *, boundaries: bool = False) -> Iterator[Record]:
        """All records of these executions but their groups, in an order in which they can be applied; boundaries only on request."""
        chosen = sorted(executions)
        yield from (self.executions[e] for e in chosen)
        yield from (self.nodes[n] for n in sorted({n for e in chosen for n in self.closure(e)}))
        for e in chosen:
            for call in self._calls_of.get(e, ()):
                yield self.intents[call]
                if call in self.call_ends:
                    yield self.call_ends[call]
            if boundaries and e not in self.ends:
                yield from self.boundaries.get(e, {}).values()
        yield from (self.ends[e] for e in chosen if e in self.ends)


class Contents:
    """Hashes of a forest's nodes, the execution that each path belongs to, and context by what it says."""

    def __init__(self) -> None:
        self.hashes: dict[int, bytes] = {}
        self.owners: dict[int, int] = {-1: -1}
        """-1: no sampled token on the path, anybody may go on from here; else the one execution that may."""
        self._context: dict[tuple[int, bytes], int] = {}

    def hash_under(self, parent: int, kind: NodeKind, tokens: NDArray[np.int32]) -> bytes:
        """The content hash that such a node would have."""
        return content_hash(self.hashes.get(parent, _NO_HASH), kind, tokens)

    def context(self, parent: int, digest: bytes) -> int | None:
        """The context node with this content under `parent`, if there is one."""
        return self._context.get((parent, digest))

    def shared(self) -> list[tuple[tuple[int, bytes], int]]:
        """Context that anybody may go on from, as (parent, hash) and node, oldest first."""
        return [(key, node) for key, node in list(self._context.items()) if self.owners[node] == -1]

    def add(self, node: Node, digest: bytes | None = None) -> None:
        """Take a node in; its parent was taken in before."""
        self.hashes[node.node] = digest or self.hash_under(node.parent, node.kind, node.tokens)
        if node.kind is NodeKind.CONTEXT:
            self.owners[node.node] = self.owners[node.parent]
            self._context.setdefault((node.parent, self.hashes[node.node]), node.node)
        else:
            self.owners[node.node] = node.execution

    @staticmethod
    def of(nodes: Mapping[int, Node], known: Mapping[int, bytes]) -> Contents:
        """Of a whole forest; hashes already `known` are not computed again."""
        contents = Contents()
        for node in sorted(nodes):
            contents.add(nodes[node], known.get(node))
        return contents
