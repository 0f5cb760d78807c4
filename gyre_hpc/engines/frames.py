"""Sampled tokens as binary frames: the wire between our engines and the gateway.

A reader asks with `Accept: application/x-gyre-frames`. The body is a sequence of frames, little-endian, each a head of 16 bytes
(kind u8, finish u8, 0 u16, bytes behind the head u32, spans u32, tokens u32) and:
- kind 0, a sign of life: nothing;
- kind 1, tokens: spans of (tokens u32, weight version i32), the ids i32, the log-probs f32 (nats). Finish: 0 goes on, 1 stop, 2 length;
- kind 2, a fault, after which nothing follows: its text in UTF-8.
Why not JSON: 6,000 tokens are 48 KB and views of what was read, where JSON has 170 KB and makes 18,000 Python objects.
Invariants: `Frames` gives what the frames say wherever the network cuts them; what stands in front of a fault, or of bytes that are no
frame, is given first; no bytes at all make anything but chunks and an EngineFault.
"""

from __future__ import annotations

import struct

import numpy as np

from gyre_hpc.engines.protocol import EngineFault, TokenChunk

MEDIA = "application/x-gyre-frames"
LIMIT = 1 << 26
"""Bytes of a frame from which on it is damage."""
ALIVE = bytes(16)
_HEAD = struct.Struct("<BBHIII")
_SPAN = struct.Struct("<Ii")
_ALIVE, _TOKENS, _FAULT = range(3)
_FINISH = (None, "stop", "length")
_LENGTH = 2
_CODES = {finish: code for code, finish in enumerate(_FINISH)}
_ID, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")


def frame(chunk: TokenChunk) -> bytes:
    """The frame of a chunk (its `exact` is not told)."""
    versions, count = chunk.versions, len(chunk)
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1)) if count else np.zeros(0, np.int64)
    spans = np.stack([np.diff(starts, append=count), versions[starts]], axis=1).astype(_ID).tobytes()
    parts = [spans, chunk.tokens.astype(_ID, copy=False).tobytes(), chunk.logprobs.astype(_LOGPROB, copy=False).tobytes()]
    size = sum(map(len, parts))
    return b"".join([_HEAD.pack(_TOKENS, _CODES[chunk.finish], 0, size, len(starts), count), *parts])


def fault(text: str) -> bytes:
    """The frame that tells why nothing more comes."""
    data = text.encode(errors="replace")
    return _HEAD.pack(_FAULT, 0, 0, len(data), 0, 0) + data


class Frames:
    """Reads an answer. What has come together is one chunk, since each costs its readers as much as hundreds of tokens."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = 0
        self._need = _HEAD.size

    def feed(self, data: bytes) -> list[TokenChunk | EngineFault]:
        """What is whole now: at most one chunk, and at most one fault behind it. Nothing may be fed behind a fault or a `finish`."""
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        taken = _Taken(b"".join(self._parts))
        self._parts, self._have, self._need = [taken.rest], len(taken.rest), taken.need
        return taken.items


class _Taken:
    """The whole frames at the beginning of some bytes. `rest`: what follows them; `need`: bytes that it must have to go on."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._ids: list[memoryview] = []
        self._logprobs: list[memoryview] = []
        self._spans: list[tuple[int, int]] = []
        self.need = head = _HEAD.size
        at, end, finish, fault = 0, len(data), 0, ""
        while not fault and not finish and end - at >= head:
            kind, finish, zero, size, spans, tokens = _HEAD.unpack_from(data, at)
            at += head
            if fault := _impossible(kind, finish, zero, size, spans, tokens):
                break
            if end - at < size:
                at, finish, self.need = at - head, 0, head + size
                break
            if kind == _TOKENS:
                fault = self._tokens(at, spans, tokens)
            elif kind == _FAULT:
                fault = f"engine: {bytes(self._data[at : at + size]).decode(errors='replace')}"
            at += size
        self.rest = b"" if fault else data[at:]
        self.items: list[TokenChunk | EngineFault] = [EngineFault(fault)] if fault else []
        if self._ids or (finish and not fault):
            self.items.insert(0, self._chunk(None if fault else _FINISH[finish]))

    def _tokens(self, at: int, spans: int, tokens: int) -> str:
        """Take a frame's columns; why they can't be."""
        data, ids = self._data, at + _SPAN.size * spans
        told = [_SPAN.unpack_from(data, at)] if spans == 1 else list(_SPAN.iter_unpack(data[at:ids]))
        covered = told[0][0] if spans == 1 else sum(count for count, _ in told)
        if covered != tokens:
            return f"the engine sent {tokens} tokens with versions for {covered}"
        if tokens:
            logprobs = ids + 4 * tokens
            self._spans += told
            self._ids.append(data[ids:logprobs])
            self._logprobs.append(data[logprobs : logprobs + 4 * tokens])
        return ""

    def _chunk(self, finish: str | None) -> TokenChunk:
        tokens, logprobs = np.frombuffer(b"".join(self._ids), _ID), np.frombuffer(b"".join(self._logprobs), _LOGPROB)
        versions = {version for _, version in self._spans}
        if len(versions) == 1:
            column = np.full(len(tokens), versions.pop(), np.int32)
        else:
            spans = np.array(self._spans, np.int64).reshape(-1, 2)
            column = np.repeat(spans[:, 1].astype(np.int32), spans[:, 0])
        return TokenChunk(tokens, logprobs, column, finish)


def _impossible(kind: int, finish: int, zero: int, size: int, spans: int, tokens: int) -> str:
    """Why this is no head of a frame, or ""."""
    if kind == _TOKENS and finish <= _LENGTH and not zero and size == 8 * (spans + tokens) <= LIMIT:
        return ""
    if kind != _TOKENS and kind <= _FAULT and not finish and not zero and not spans and not tokens and size <= (LIMIT if kind else 0):
        return ""
    return f"the engine sent what is no frame: {_HEAD.pack(kind, finish, zero, size, spans, tokens).hex()}"
