"""One execution's tree in memory: nodes, calls, leaves, paths.

Invariants: nodes are ordered by id and a parent's id is smaller than its child's; the tree is closed under parents (shared
context of other executions included, their sampled nodes never). Only SAMPLED nodes of DELIVERED calls are targets. A tree is *incomplete*
while one of its calls has an intent and no end: something may have been sampled that was never recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trees.records import CallEnd, Execution, ExecutionEnd, Fate, Intent, Node, NodeKind, Role


@dataclass(frozen=True)
class TreeNode:
    """A node without its tokens: they are at [offset, offset + length) of the tree's columns."""

    node: int
    parent: int
    execution: int
    call: int
    kind: NodeKind
    role: Role
    offset: int
    length: int


@dataclass(frozen=True)
class Call:
    """A call, intent and end together. `fate` None: no end was recorded."""

    call: int
    execution: int
    prompt: int
    role: Role
    digest: bytes
    sampled: int = -1
    fate: Fate | None = None
    finish: str = ""
    difference: str = ""

    @staticmethod
    def of(intent: Intent, end: CallEnd | None) -> Call:
        """Join the two records of a call."""
        begun = Call(intent.call, intent.execution, intent.prompt, intent.role, intent.digest)
        if end is None:
            return begun
        return Call(begun.call, begun.execution, begun.prompt, begun.role, begun.digest, end.sampled, end.fate, end.finish, end.difference)


@dataclass(frozen=True, eq=False)
class Columns:
    """Token columns: `tokens` int32[T]; `logprobs` float32[T] (NaN for context); `versions` int32[T] (-1 for context)."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    @staticmethod
    def of(nodes: Sequence[Node]) -> Columns:
        """The columns of these nodes, one after the other."""
        tokens = [node.tokens for node in nodes]
        logprobs = [np.full(len(n.tokens), np.nan, np.float32) if n.logprobs is None else n.logprobs for n in nodes]
        versions = [np.full(len(n.tokens), -1, np.int32) if n.versions is None else n.versions for n in nodes]
        return Columns(_join(tokens, np.int32), _join(logprobs, np.float32), _join(versions, np.int32))


def _join(parts: Sequence[NDArray], dtype: type) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, eq=False)
class Tree:
    """The tree of `execution`. `columns` is None in a skeleton (lengths only, for statistics)."""

    execution: Execution
    end: ExecutionEnd | None
    nodes: dict[int, TreeNode]
    calls: dict[int, Call]
    columns: Columns | None = field(repr=False)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Children of each node by id, and the roots under -1; all in ascending order."""
        below: dict[int, list[int]] = {-1: [], **{node: [] for node in self.nodes}}
        for node in self.nodes.values():
            below[node.parent].append(node.node)
        return below

    @cached_property
    def leaves(self) -> list[int]:
        """Nodes without children in this tree, ascending."""
        return [node for node in self.nodes if not self.children[node]]

    @property
    def incomplete(self) -> bool:
        """A call has an intent and no end."""
        return any(call.fate is None for call in self.calls.values())

    def path(self, node: int) -> list[int]:
        """Node ids from the root down to `node`."""
        up = []
        while node >= 0:
            up.append(node)
            node = self.nodes[node].parent
        return up[::-1]

    def path_length(self, node: int) -> int:
        """Tokens from the root to the end of `node`."""
        return sum(self.nodes[n].length for n in self.path(node))

    def is_target(self, node: int) -> bool:
        """The policy sampled this node in a call that was delivered."""
        row = self.nodes[node]
        if row.kind is not NodeKind.SAMPLED:
            return False
        call = self.calls.get(row.call)
        return call is not None and call.fate is Fate.DELIVERED and call.sampled == node

    def role_of(self, leaf: int) -> Role:
        """The class of a leaf: the role of its call; for a context leaf that of the last call that it was the prompt of."""
        row = self.nodes[leaf]
        if row.kind is NodeKind.SAMPLED and row.call in self.calls:
            return self.calls[row.call].role
        asked = [call for call in self.calls.values() if call.prompt == leaf]
        return max(asked, key=lambda call: call.call).role if asked else row.role

    def column_slices(self, nodes: Iterable[int]) -> list[slice]:
        """Where these nodes' tokens lie in `columns`."""
        return [slice(self.nodes[n].offset, self.nodes[n].offset + self.nodes[n].length) for n in nodes]

    def tokens_of(self, nodes: Iterable[int]) -> NDArray[np.int32]:
        """The tokens of these nodes, joined: int32[T]."""
        if self.columns is None:
            raise ValueError(f"tree of execution {self.execution.execution} was read without tokens")
        return _join([self.columns.tokens[s] for s in self.column_slices(nodes)], np.int32)


def build(execution: Execution, end: ExecutionEnd | None, nodes: Sequence[Node], calls: Iterable[Call]) -> Tree:
    """A tree from whole records; `nodes` must be closed under parents."""
    rows: dict[int, TreeNode] = {}
    offset = 0
    ordered = sorted(nodes, key=lambda n: n.node)
    for n in ordered:
        rows[n.node] = TreeNode(n.node, n.parent, n.execution, n.call, n.kind, n.role, offset, len(n.tokens))
        offset += len(n.tokens)
    return Tree(execution, end, rows, {c.call: c for c in sorted(calls, key=lambda c: c.call)}, Columns.of(ordered))
