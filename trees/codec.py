"""Records to bytes and back: the payload of a journal's frames.

A payload is a sequence of (length u32, body); a body is a tag byte, the record's fixed fields (little-endian) and its arrays and
strings. The first frame of a journal is a `Header` (JSON). Invariant: `decode(encode(records)) == records`, bit for bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trees.catalogue import Entry
from trees.errors import Damaged, StoreError
from trees.ids import Ids
from trees.records import Boundary, CallEnd, Execution, ExecutionEnd, Fate, Group, Intent, Node, NodeKind, Record, Role

SCHEMA = 1
"""Version of the segments. A reader refuses a higher one."""
JOURNAL_SCHEMA = 2
"""Version of the journal; 1 is read too."""
_OTHER = "use the version of gyre-hpc that wrote it"
RESTORE = "restore this file from a copy, or run gyre trees repair"
_SETS = ("executions", "groups", "lost")

_LENGTH = struct.Struct("<I")
_GROUP = struct.Struct("<Bqqqq")
_EXECUTION = struct.Struct("<Bqqqq")
_NODE = struct.Struct("<BqqqqBBIB")
_INTENT = struct.Struct("<BqqqB16s")
_CALL_END = struct.Struct("<BqqqBH")
_EXECUTION_END = struct.Struct("<BqdBqqdH")
_BOUNDARY = struct.Struct("<BqqqI16s")
_TAG_GROUP, _TAG_EXECUTION, _TAG_NODE, _TAG_INTENT, _TAG_CALL_END, _TAG_EXECUTION_END, _TAG_BOUNDARY = range(1, 8)


@dataclass(frozen=True)
class Header:
    """What a journal builds upon: the sealed segments that count, oldest content first, and the first ids that are free.

    `executions`, `groups`: those in segments. `lost`: executions that a repair had to give up; they are in no file. `legacy`: segments 1..n
    of a store of schema 1, which listed none (see sealed.catalogued).
    """

    generation: int
    segments: tuple[Entry, ...] = ()
    next_segment: int = 1
    next_node: int = 0
    next_call: int = 0
    next_execution: int = 0
    executions: Ids = field(default_factory=Ids)
    groups: Ids = field(default_factory=Ids)
    lost: Ids = field(default_factory=Ids)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    legacy: int = 0

    def encode(self) -> bytes:
        """As JSON."""
        sets = {name: getattr(self, name).spans for name in _SETS}
        entries = [entry.as_dict() for entry in self.segments]
        fields = {**self.__dict__, **sets, "segments": entries, "provenance": dict(self.provenance)}
        return json.dumps({"schema": JOURNAL_SCHEMA, **fields}).encode()

    @staticmethod
    def decode(payload: bytes) -> Header:
        """StoreError for a schema that is not ours."""
        try:
            fields = dict(json.loads(payload))
            schema = fields.pop("schema")
            if schema == SCHEMA:
                count = fields.pop("segments")
                return Header(**fields, legacy=count, next_segment=count + 1)
            if schema != JOURNAL_SCHEMA:
                raise StoreError(
                    f"the journal has schema {schema}, this program reads {SCHEMA} and {JOURNAL_SCHEMA}",
                    _OTHER,
                )
            sets = {name: Ids((first, last) for first, last in fields[name]) for name in _SETS}
            return Header(**{**fields, **sets, "segments": tuple(Entry.of(entry) for entry in fields["segments"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"the journal's header can't be read ({error})", "restore the journal from a copy, or run gyre trees repair"
            ) from error


def encode(record: Record) -> bytes:
    """One record with its length, to be joined with others into a payload."""
    body = _body(record)
    return _LENGTH.pack(len(body)) + body


def decode(payload: bytes) -> Iterator[Record]:
    """The records of a payload. StoreError for an unknown tag (the frame's checksum has passed: another version wrote it)."""
    at = 0
    while at < len(payload):
        try:
            (length,) = _LENGTH.unpack_from(payload, at)
            at += _LENGTH.size
            record = _record(payload[at : at + length])
        except (struct.error, ValueError, IndexError) as error:
            raise StoreError(
                f"the journal holds a record that means nothing ({error})", "use the version of gyre-hpc that wrote it"
            ) from error
        yield record
        at += length


def payloads(records: Iterable[Record], limit: int) -> Iterator[bytes]:
    """Payloads of about `limit` bytes that hold these records."""
    parts: list[bytes] = []
    size = 0
    for record in records:
        part = encode(record)
        parts.append(part)
        size += len(part)
        if size >= limit:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _body(record: Record) -> bytes:
    match record:
        case Node():
            return _node_body(record)
        case Intent():
            return _INTENT.pack(_TAG_INTENT, record.call, record.execution, record.prompt, record.role, record.digest)
        case CallEnd():
            finish = record.finish.encode()
            fixed = _CALL_END.pack(_TAG_CALL_END, record.call, record.execution, record.sampled, record.fate, len(finish))
            return fixed + finish + record.difference.encode()
        case Group():
            return _GROUP.pack(_TAG_GROUP, record.group, record.size, record.version, record.burst) + record.task.encode()
        case Execution():
            return _EXECUTION.pack(_TAG_EXECUTION, record.execution, record.group, record.index, record.attempt)
        case ExecutionEnd():
            r, reason = record, record.reason.encode()
            fixed = _EXECUTION_END.pack(_TAG_EXECUTION_END, r.execution, r.score, r.valid, r.calls, r.tokens, r.seconds, len(reason))
            return fixed + reason + r.detail.encode()
        case Boundary():
            b = record
            return _BOUNDARY.pack(_TAG_BOUNDARY, b.execution, b.call, b.node, b.depth, b.digest) + b.note


def _node_body(node: Node) -> bytes:
    sampled = node.logprobs is not None
    fixed = _NODE.pack(_TAG_NODE, node.node, node.parent, node.execution, node.call, node.kind, node.role, len(node.tokens), sampled)
    parts = [fixed, np.ascontiguousarray(node.tokens, "<i4").tobytes()]
    if node.logprobs is not None and node.versions is not None:
        parts += [np.ascontiguousarray(node.logprobs, "<f4").tobytes(), np.ascontiguousarray(node.versions, "<i4").tobytes()]
    return b"".join(parts)


def _record(body: bytes) -> Record:
    match body[0]:
        case 1:
            _, group, size, version, burst = _GROUP.unpack_from(body)
            return Group(group, body[_GROUP.size :].decode(), size, version, burst)
        case 2:
            return Execution(*_EXECUTION.unpack(body)[1:])
        case 3:
            return _node(body)
        case 4:
            _, call, execution, prompt, role, digest = _INTENT.unpack(body)
            return Intent(call, execution, prompt, Role(role), digest)
        case 5:
            _, call, execution, sampled, fate, n = _CALL_END.unpack_from(body)
            text = body[_CALL_END.size :]
            return CallEnd(call, execution, sampled, Fate(fate), text[:n].decode(), text[n:].decode())
        case 6:
            _, execution, score, valid, calls, tokens, seconds, n = _EXECUTION_END.unpack_from(body)
            text = body[_EXECUTION_END.size :]
            return ExecutionEnd(execution, text[:n].decode(), score, bool(valid), calls, tokens, seconds, text[n:].decode())
        case 7:
            _, execution, call, node, depth, digest = _BOUNDARY.unpack_from(body)
            return Boundary(execution, call, node, depth, digest, body[_BOUNDARY.size :])
        case tag:
            raise StoreError(f"the journal holds a record of unknown kind {tag}", _OTHER)


def _node(body: bytes) -> Node:
    _, node, parent, execution, call, kind, role, n, sampled = _NODE.unpack_from(body)
    # Copies: a view would keep the whole group commit in memory.
    tokens = np.frombuffer(body, "<i4", n, _NODE.size).copy()
    if not sampled:
        return Node(node, parent, execution, call, NodeKind(kind), Role(role), tokens)
    logprobs = np.frombuffer(body, "<f4", n, _NODE.size + 4 * n).copy()
    versions = np.frombuffer(body, "<i4", n, _NODE.size + 8 * n).copy()
    return Node(node, parent, execution, call, NodeKind(kind), Role(role), tokens, logprobs, versions)
