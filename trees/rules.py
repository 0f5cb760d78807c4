"""What may be appended: the invariants of the store, checked before a record is taken in.

A record that breaks one is a mistake of the caller: ValueError, and the store is as before.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np

from trees.forest import HASH_BYTES, Contents, Forest
from trees.records import Boundary, CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Record

DETAIL_BYTES = 1000
"""Longer details are cut: they are remarks, and a column is as wide as its longest value."""
NAME_BYTES = 4096
NOTE_BYTES = 1 << 16


def trimmed(record: Record) -> Record:
    """The record as it is stored: arrays of the stored types, private to the store; details cut."""
    if isinstance(record, Node):
        return replace(
            record,
            tokens=np.array(record.tokens, np.int32),
            logprobs=None if record.logprobs is None else np.array(record.logprobs, np.float32),
            versions=None if record.versions is None else np.array(record.versions, np.int32),
        )
    if isinstance(record, ExecutionEnd):
        return replace(record, detail=record.detail.replace("\0", " ").encode(errors="replace")[:DETAIL_BYTES].decode(errors="ignore"))
    return record


def check(record: Record, forest: Forest, contents: Contents, groups: Container[int], sealing: Container[int]) -> None:
    """Raise ValueError if `record` must not follow what is in `forest`. `sealing`: executions that are on their way into a segment."""
    match record:
        case Group():
            _need(record.group not in groups, f"group {record.group} exists")
            _need(record.size >= 1, f"group {record.group} has size {record.size}")
            _name(record.task, "task")
        case Execution():
            group = forest.groups.get(record.group)
            _need(record.execution not in forest.executions, f"execution {record.execution} exists")
            _need(record.group in groups, f"execution {record.execution} is of an unknown group {record.group}")
            _need(
                group is None or 0 <= record.index < group.size, f"execution {record.execution} has index {record.index} outside its group"
            )
        case Node():
            _live(record.execution, forest, sealing)
            _node(record, forest, contents)
        case Intent():
            _live(record.execution, forest, sealing)
            _need(record.call not in forest.intents, f"call {record.call} exists")
            _need(len(record.digest) == HASH_BYTES, f"call {record.call}: a digest has {HASH_BYTES} bytes, not {len(record.digest)}")
            _reachable(record.prompt, record.execution, forest, contents)
        case CallEnd():
            _live(record.execution, forest, sealing)
            _call_end(record, forest)
        case ExecutionEnd():
            _live(record.execution, forest, sealing)
            _need(record.execution not in forest.ends, f"execution {record.execution} has ended before")
            _name(record.reason, "reason")
        case Boundary():
            _live(record.execution, forest, sealing)
            _boundary(record, forest)


def _node(record: Node, forest: Forest, contents: Contents) -> None:
    node, n = record.node, len(record.tokens)
    _need(node not in forest.nodes, f"node {node} exists: nodes never change")
    _need(record.parent < node, f"node {node} must have a higher id than its parent {record.parent}")
    _need(record.tokens.ndim == 1 and n >= 1, f"node {node} needs a row of at least one token")
    if record.parent >= 0:
        _reachable(record.parent, record.execution, forest, contents)
    if record.kind is NodeKind.CONTEXT:
        _need(record.logprobs is None and record.versions is None, f"context node {node} can't have log-probs or versions")
        return
    _need(record.parent >= 0, f"sampled node {node} needs a prompt before it")
    intent = forest.intents.get(record.call)
    _need(
        intent is not None and intent.execution == record.execution,
        f"sampled node {node}: execution {record.execution} has no call {record.call}",
    )
    _need(intent is not None and intent.prompt == record.parent, f"sampled node {node} does not continue the prompt of call {record.call}")
    _need(record.call not in forest.call_ends, f"sampled node {node}: call {record.call} is over")
    columns = record.logprobs is not None and record.versions is not None and record.logprobs.shape == record.versions.shape == (n,)
    _need(columns, f"sampled node {node} needs {n} log-probs and versions")
    _need(
        record.logprobs is not None and bool(np.isfinite(record.logprobs).all()), f"sampled node {node} has log-probs that are not finite"
    )


def _call_end(record: CallEnd, forest: Forest) -> None:
    intent = forest.intents.get(record.call)
    _need(intent is not None and intent.execution == record.execution, f"execution {record.execution} has no call {record.call}")
    before = forest.call_ends.get(record.call)
    superseded = before is not None and before.fate is Fate.DELIVERED and record == replace(before, fate=Fate.SUPERSEDED)
    _need(before is None or superseded, f"call {record.call} is over")
    if record.sampled >= 0:
        node = forest.nodes.get(record.sampled)
        _need(
            node is not None and node.kind is NodeKind.SAMPLED and node.call == record.call,
            f"node {record.sampled} was not sampled by call {record.call}",
        )
    _name(record.finish, "finish")
    _name(record.difference, "difference")


def _boundary(record: Boundary, forest: Forest) -> None:
    intent, end = forest.intents.get(record.call), forest.call_ends.get(record.call)
    _need(intent is not None and intent.execution == record.execution, f"execution {record.execution} has no call {record.call}")
    ends = (intent.prompt if intent else -1, end.sampled if end else -1)
    _need(record.node >= 0 and record.node in ends, f"node {record.node} ends neither prompt nor answer of call {record.call}")
    _need(len(record.digest) == HASH_BYTES, f"boundary of call {record.call}: a digest has {HASH_BYTES} bytes, not {len(record.digest)}")
    _need(0 <= record.depth < 1 << 32 and len(record.note) <= NOTE_BYTES, f"boundary of call {record.call}: depth or note too large")


def _live(execution: int, forest: Forest, sealing: Container[int]) -> None:
    _need(execution in forest.executions and execution not in sealing, f"execution {execution} is unknown or sealed")


def _reachable(node: int, execution: int, forest: Forest, contents: Contents) -> None:
    _need(node in forest.nodes, f"node {node} is unknown")
    owner = contents.owners[node]
    _need(owner in (-1, execution), f"node {node} goes on from tokens sampled by execution {owner}, not {execution}")


def _name(text: str, what: str) -> None:
    _need(len(text.encode()) <= NAME_BYTES and "\0" not in text, f"a {what} is at most {NAME_BYTES} bytes, none of them 0")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
