"""Request bodies, of which only what is new is read.

A harness sends its whole history with each call, 3 MB at 700,000 tokens. What was read before is known again by its bytes:
- *snapshot*: the body begins with the very bytes of an earlier one, up to the end of some item of its list; only the rest is parsed;
- *items*: otherwise each item of the list is known by the hash of its bytes (dialects whose items are turns by themselves);
- otherwise everything is parsed.
Invariant: a conversation is the same by whichever way it was read, and so is the refusal of a body. Why that holds: bytes that are skipped
were parsed before, in the same place of the same grammar (equal bytes from the beginning on; or a whole item of the list, cut out by a JSON
reader); the rest is parsed with a mark in place of what was skipped, so a list that comes twice, or a mark that is not found again, shows;
and whatever is unusual in the rest goes to the plain way, which has the last word.

A known turn has no text (`Known`): the memory of an execution holds hashes, not histories, but for its last body, which goes when there are
too many (live.Texts): to compare 3 MB with it costs a fifth of what hashing them costs. Who needs the text of a known turn (a history that
was cut back) asks for the whole conversation (`Conversation.whole`). Hashes are blake3, and belong to one execution: a harness can only
fool itself.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import orjson
from blake3 import blake3

from gyre_hpc.gateway.calls import BadRequest
from gyre_hpc.gateway.dialects.canonical import Conversation, Items, Known, Message

SNAPSHOTS = 12
"""Of one execution (sub-agents too): each body adds two and takes away the one it began with; those used longest ago go."""
BEFORE = (5, 1)
"""Items before the end at which snapshots are taken: harnesses mark or edit the last ones."""
SMALL = 20_000
"""Bytes of a body below which it is simply parsed."""
_MARK_TEXT = secrets.token_hex(16)
_MARK = b'"' + _MARK_TEXT.encode() + b'"'
_BEGIN = 64
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_int
"""Nothing of Python compares the first bytes of two objects without copying them."""


@dataclass(frozen=True)
class Shape:
    """What reading needs to know of a dialect.

    `path`: its endpoint; `name`: the key of its list; `turns`: some items -> their turns, blank ones too, known ones as they are (raises
    BadRequest, UnsupportedContent); `alone`: every item is one turn by itself; `closed`: no later item belongs to the turn of this one;
    `above`: a leading item is part of the system prompt: it is given as it is.
    """

    path: str
    name: str
    turns: Callable[[Sequence[Any]], list[Message]]
    alone: bool = True
    closed: Callable[[Any], bool] = lambda item: True
    above: Callable[[Any], bool] = lambda item: False


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The first `end` bytes of a body, which hash to `digest`.

    `front`: bytes up to where the list's first item begins, or the end of the `above` leading ones that are given as they are; `turns`: of
    the items behind those, without blank ones; `head`, `trail`: a head's key and the digests of the boundaries of `turns` under it.
    """

    kind: tuple[str, str]
    begin: bytes
    last: bytes
    end: int
    digest: bytes
    front: int
    above: int
    turns: tuple[Known, ...]
    head: bytes = b""
    trail: tuple[bytes, ...] = ()

    def begins(self, raw: bytes) -> bool:
        """Whether `raw` may begin with these bytes, by their first and last ones."""
        return raw.startswith(self.begin) and raw.startswith(self.last, self.end - len(self.last))


@dataclass(frozen=True)
class Last:
    """The last body of an execution, and what was taken of it: snapshots, shortest first, each with the hash so far (of blake3)."""

    raw: bytes
    marks: Sequence[tuple[Snapshot, Any]]


@dataclass
class Memory:
    """What is known of the bodies of one execution."""

    snapshots: list[Snapshot] = field(default_factory=list)
    """Those that were used last stand last."""
    last: Last | None = None
    """May be dropped at any time."""
    items: dict[tuple[tuple[str, str], bytes], Known] = field(default_factory=dict)


@dataclass
class Body:
    """A body that was read: `fields`, in which the list has turns in place of items; `digest`: 32 bytes over its bytes."""

    fields: dict[str, Any]
    digest: bytes
    memory: Memory
    used: Snapshot | None
    taken: list[tuple[Snapshot, Any]]
    raw: bytes

    def conversation(self, read: Conversation, whole: Callable[[], Conversation]) -> Conversation:
        """`read` was made of `fields`; `whole` makes it of all the bytes. The memory learns what the next body may begin with."""
        if read.messages and isinstance(read.messages[-1], Known):
            return whole()
        known = next((at for at in range(len(read.messages), 0, -1) if isinstance(read.messages[at - 1], Known)), 0)
        trail = self.used.trail if self.used is not None and self.used.head == read.head.key else ()
        read = Conversation(read.head, read.messages, read.harness, known, trail, whole)
        digests, head = read.digests, read.head.key
        marks = [(replace(snapshot, head=head, trail=digests[: len(snapshot.turns) + 1]), hasher) for snapshot, hasher in self.taken]
        self.memory.snapshots += [snapshot for snapshot, _ in marks]
        if marks:
            self.memory.last = Last(self.raw, marks)
        if self.used in self.memory.snapshots:
            self.memory.snapshots.remove(self.used)
            if not self.taken:
                self.memory.snapshots.append(self.used)
        del self.memory.snapshots[:-SNAPSHOTS]
        return read


def read_body(raw: bytes, shape: Shape, harness: str, memory: Memory) -> Body | None:
    """The body by one of the quick ways; None: it must be parsed as a whole."""
    if len(raw) < SMALL:
        return None
    kind = (shape.path, harness)
    try:
        snapshot, hasher = _find(raw, kind, memory)
        if snapshot is not None:
            return _from_snapshot(raw, shape, snapshot, hasher, memory)
        return _from_items(raw, shape, kind, memory)
    except (BadRequest, ValueError, TypeError, LookupError, AttributeError, RecursionError, msgspec.MsgspecError):
        return None  # whatever it is, the plain way says it


def _find(raw: bytes, kind: tuple[str, str], memory: Memory) -> tuple[Snapshot | None, Any]:
    """A long snapshot that `raw` begins with, and the hash of those bytes: of the last body, or else the longest of all."""
    if (last := memory.last) is not None:
        for snapshot, state in reversed(last.marks):
            if snapshot.kind == kind and snapshot.begins(raw) and not _memcmp(raw, last.raw, snapshot.end):
                return snapshot, state.copy()
    likely = [snapshot for snapshot in memory.snapshots if snapshot.kind == kind and snapshot.begins(raw)]
    found, state, hasher, at = None, None, blake3(), 0
    for snapshot in sorted(likely, key=lambda s: s.end):
        hasher.update(memoryview(raw)[at : snapshot.end])
        at = snapshot.end
        if hasher.digest() == snapshot.digest:
            found, state = snapshot, hasher.copy()
    return found, state


def _from_snapshot(raw: bytes, shape: Shape, snapshot: Snapshot, hasher: Any, memory: Memory) -> Body | None:
    comma = b"," if snapshot.above else b""
    short = b"".join((raw[: snapshot.front], comma, _MARK, memoryview(raw)[snapshot.end :]))
    fields = orjson.loads(short)
    above, (mark, *new) = fields[shape.name][: snapshot.above], fields[shape.name][snapshot.above :]
    if mark != _MARK_TEXT or not new:
        return None
    spans = _spans(short, shape)[snapshot.above + 1 :]
    shift = len(raw) - len(short)
    turns, cuts = _segments(new, shape)
    ends = [spans[cut - 1][1] + shift for cut, _ in cuts]
    *hashes, whole = _hashes(raw, ends, hasher, snapshot.end)
    taken = [
        (_snapshot(raw, end, state, snapshot, (*snapshot.turns, *_known(turns[:upto]))), state)
        for end, state, (_, upto) in zip(ends, hashes, cuts, strict=True)
    ]
    if shape.alone:
        _learn(memory, snapshot.kind, [blake3(short[first:last]).digest(16) for first, last in spans], turns)
    items = Items([*above, *turns])
    items.known = snapshot.turns
    return Body({**fields, shape.name: items}, whole.digest(), memory, snapshot, taken, raw)


def _from_items(raw: bytes, shape: Shape, kind: tuple[str, str], memory: Memory) -> Body | None:
    spans = _spans(raw, shape)
    view = memoryview(raw)
    fields = orjson.loads(b"".join((view[: spans[0][0]], _MARK, view[spans[-1][1] :])))
    if fields[shape.name] != [_MARK_TEXT]:
        return None
    hashes = [blake3(view[first:last]).digest(16) for first, last in spans] if shape.alone else []
    known: list[Known | None] = [memory.items.get((kind, digest)) for digest in hashes] or [None] * len(spans)
    known[-2:] = [None] * len(known[-2:])
    above = 0
    while above < len(spans) and shape.above(orjson.loads(raw[slice(*spans[above])])):
        known[above] = None
        above += 1
    parts = [raw[first:last] for (first, last), turn in zip(spans, known, strict=True) if turn is None]
    unknown = iter(orjson.loads(b"[" + b",".join(parts) + b"]"))
    items = [next(unknown) if turn is None else turn for turn in known]
    turns, cuts = _segments(items[above:], shape)
    ends = [spans[above + cut - 1][1] for cut, _ in cuts]
    *states, whole = _hashes(raw, ends, blake3(), 0)
    first = Snapshot(kind, b"", b"", 0, b"", spans[above - 1][1] if above else spans[0][0], above, ())
    taken = [
        (_snapshot(raw, end, state, first, tuple(_known(turns[:upto]))), state)
        for end, state, (_, upto) in zip(ends, states, cuts, strict=True)
    ]
    if shape.alone:
        _learn(memory, kind, hashes[above:], turns)
    return Body({**fields, shape.name: Items([*items[:above], *turns])}, whole.digest(), memory, None, taken, raw)


def _segments(items: Sequence[Any], shape: Shape) -> tuple[list[Message], list[tuple[int, int]]]:
    """Turns of the items, and the places for snapshots: (items, turns) before each."""
    places = []
    least = 0
    for before in BEFORE:
        cut = len(items) - before
        while cut > least and not shape.closed(items[cut - 1]):
            cut -= 1
        if cut > least:
            places.append(cut)
            least = cut
    turns: list[Message] = []
    cuts = []
    at = 0
    for cut in [*places, len(items)]:
        turns += shape.turns(items[at:cut])
        cuts.append((cut, len(turns)))
        at = cut
    return turns, cuts[:-1]


def _spans(raw: bytes, shape: Shape) -> list[tuple[int, int]]:
    """[first, last) bytes of each item of the list."""
    items = getattr(_decoder(shape.name).decode(raw), shape.name)
    at = _address(items[0]) - _address(raw)
    spans = []
    for item in items:
        while raw[at] in b", \t\r\n":
            at += 1
        spans.append((at, at + len(memoryview(item))))
        at = spans[-1][1]
    return spans


@cache
def _decoder(name: str) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(msgspec.defstruct("Top", [(name, list[msgspec.Raw])]))


def _address(data: Any) -> int:
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place


def _hashes(raw: bytes, ends: Sequence[int], hasher: Any, at: int) -> list[Any]:
    """The hash of the first `end` bytes for each end, and of all. `hasher` has the first `at`."""
    states = []
    for end in ends:
        hasher.update(memoryview(raw)[at:end])
        states.append(hasher.copy())
        at = end
    hasher.update(memoryview(raw)[at:])
    return [*states, hasher]


def _snapshot(raw: bytes, end: int, state: Any, like: Snapshot, turns: tuple[Known, ...]) -> Snapshot:
    first, last = raw[:_BEGIN], raw[max(0, end - _BEGIN) : end]
    return Snapshot(like.kind, first, last, end, state.digest(), like.front, like.above, turns)


def _known(turns: Sequence[Message]) -> list[Known]:
    """Those that say something, without their text."""
    return [turn if isinstance(turn, Known) else Known(turn.role, turn.key, False) for turn in turns if not turn.blank]


def _learn(memory: Memory, kind: tuple[str, str], hashes: Sequence[bytes], turns: Sequence[Message]) -> None:
    for digest, turn in zip(hashes, turns, strict=True):
        if (kind, digest) not in memory.items:
            memory.items[kind, digest] = turn if isinstance(turn, Known) else Known(turn.role, turn.key, turn.blank)
