"""What can be believed of damaged files: the good frames of a journal, and the whole executions of a segment.

Invariants: nothing is made up, and nothing passes that a checksum, a content hash or a rule of the store speaks against. Reads only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from trees.codec import RESTORE
from trees.errors import Damaged, StoreError
from trees.forest import Contents, Forest, content_hash
from trees.ids import AnyOf, Ids
from trees.journal import Scan, damage_after
from trees.records import CallEnd, Execution, ExecutionEnd, Group, Intent, Node, NodeKind, Record
from trees.rules import check
from trees.sealed import Segment
from trees.segment import Content
from trees.tree import Call

T = TypeVar("T")


class Rescued(NamedTuple):
    """What goes into a new segment; `heads`: executions in it of which only the end could be read."""

    content: Content
    heads: list[int]


def good_frames(fd: int) -> tuple[list[tuple[int, bytes]], list[str]]:
    """Good frames with their numbers, and what is wrong between them."""
    scan, frames, holes = Scan(fd), list[tuple[int, bytes]](), list[str]()
    while True:
        seq = scan.seq
        for payload in scan.frames():
            frames.append((seq, payload))
            seq += 1
        later = damage_after(fd, scan.offset, scan.seq)
        if later is None:
            return frames, holes
        number = int.from_bytes(os.pread(fd, 8, later + 8), "little")
        holes.append(f"bytes {scan.offset} to {later} are damaged ({number - scan.seq} commits)")
        scan = Scan(fd, later, number)


def consistent(records: Iterable[Record], sealed: Ids, groups: Iterable[Group]) -> tuple[list[Record], set[int]]:
    """The records that may follow each other, and the executions of the others. `groups`: known from segments."""
    forest, contents, kept, hurt = Forest(), Contents(), list[Record](), set[int]()
    known = {group.group for group in groups}
    for record in _intents_first(list(records)):
        if getattr(record, "execution", -1) in sealed and not isinstance(record, Node):
            continue
        try:
            check(record, forest, contents, AnyOf(forest.groups, known), ())
        except ValueError:
            # A rotated journal repeats shared context whose execution is sealed; and a record may be there twice.
            if not (isinstance(record, Node) and _is_shared(record, forest, contents)):
                if not isinstance(record, Group):
                    hurt.add(record.execution)
                continue
        if isinstance(record, Node) and record.node not in contents.hashes:
            contents.add(record)
        forest.apply(record)
        kept.append(record)
    return kept, hurt


def _intents_first(records: Sequence[Record]) -> Iterator[Record]:
    """Each intent before what its call sampled: a rotated journal has all nodes first, and the rules ask for the call."""
    intents = {record.call: record for record in records if isinstance(record, Intent)}
    early: set[int] = set()
    for record in records:
        if isinstance(record, Node) and record.kind is NodeKind.SAMPLED and record.call in intents and record.call not in early:
            early.add(record.call)
            yield intents[record.call]
        if isinstance(record, Intent):
            if record.call in early:
                continue
            early.add(record.call)
        yield record


def _is_shared(node: Node, forest: Forest, contents: Contents) -> bool:
    """A node that stands in the journal for others to go on from: its parent is there, and nobody else sampled what is before it."""
    there = contents.owners.get(node.parent) == -1 and node.node not in forest.nodes
    return there and node.kind is NodeKind.CONTEXT and node.execution not in forest.executions


def rescued(segment: Segment, taken: Ids, groups: Collection[Group]) -> Rescued:
    """The executions that a damaged segment still tells of, but for those `taken`. `groups`: known from elsewhere."""
    forest, hashes, kept, heads = Forest(), dict[int, bytes](), list[int](), list[int]()
    none = list[Group]()
    known = {group.group: group for group in [*_try(lambda: list(segment.all_groups()), none), *groups]}
    for execution in _try(lambda: [int(e) for e in segment.execution_ids], list[int]()):
        head = None if execution in taken else _head(segment, execution)
        if head is None or head[0].group not in known:
            continue
        try:
            records, its_hashes = _whole(segment, execution)
        except StoreError:
            note = f"{head[1].detail}; its tree was lost with {segment.path.name}".removeprefix("; ")
            records, its_hashes = [head[0], replace(head[1], detail=note)], {}
            heads.append(execution)
        for record in [known[head[0].group], *records]:
            forest.apply(record)
        hashes |= its_hashes
        kept.append(execution)
    return Rescued(Content(kept, forest, hashes), heads)


def _head(segment: Segment, execution: int) -> tuple[Execution, ExecutionEnd] | None:
    return _try(lambda: segment.head(execution), None)


def _whole(segment: Segment, execution: int) -> tuple[list[Record], dict[int, bytes]]:
    """All records of an execution and its nodes' hashes. Damaged: something of it can't be read or is not what was written."""
    begun, end = segment.head(execution)
    tree = segment.tree(execution)
    rows = segment.rows_of(tree.nodes)
    stored = segment.column("nodes/hash")[rows]
    hashes: dict[int, bytes] = {}
    records: list[Record] = [begun]
    nodes = segment.nodes(rows)
    for node, digest in zip(nodes, stored, strict=True):
        hashes[node.node] = content_hash(hashes.get(node.parent, bytes(16)), node.kind, node.tokens)
        if hashes[node.node] != bytes(digest):
            raise Damaged(f"{segment.path}: node {node.node} has other content than was written", RESTORE)
        if node.kind is NodeKind.SAMPLED and (node.logprobs is None or not np.isfinite(node.logprobs).all()):
            raise Damaged(f"{segment.path}: node {node.node} has log-probs that were not written", RESTORE)
    for node in nodes:
        records.append(node)
    for call in tree.calls.values():
        records += _call_records(call)
    return [*records, end], hashes


def _call_records(call: Call) -> list[Record]:
    intent = Intent(call.call, call.execution, call.prompt, call.role, call.digest)
    if call.fate is None:
        return [intent]
    return [intent, CallEnd(call.call, call.execution, call.sampled, call.fate, call.finish, call.difference)]


def _try(ask: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` if it can't be read: what is lost is named by what is missing in the end."""
    try:
        return ask()
    except StoreError:
        return otherwise
