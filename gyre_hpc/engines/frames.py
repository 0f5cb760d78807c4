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
        at, self.need, self._finish = 0, _HEAD.size, 0
        fault: EngineFault | None = None
        while fault is None and not self._finish and len(data) - at >= _HEAD.size:
            kind, finish, zero, size, spans, tokens = _HEAD.unpack_from(data, at)
            known = kind <= _FAULT and finish < len(_FINISH) and not zero and size <= LIMIT
            if not known or (kind == _TOKENS and size != 8 * (spans + tokens)) or (kind == _ALIVE and size):
                fault = EngineFault(f"the engine sent what is no frame: {data[at : at + _HEAD.size].hex()}")
            elif len(data) - at - _HEAD.size < size:
                self.need = _HEAD.size + size
                break
            elif kind == _FAULT:
                text = bytes(self._data[at + _HEAD.size : at + _HEAD.size + size])
                fault = EngineFault(f"engine: {text.decode(errors='replace')}")
            elif kind == _TOKENS:
                fault = self._tokens(at + _HEAD.size, spans, tokens)
                self._finish = finish if fault is None else 0
            at += _HEAD.size + size
        self.rest = bytes(self._data[at:]) if fault is None else b""
        self.items: list[TokenChunk | EngineFault] = [] if fault is None else [fault]
        if self._ids or self._finish:
            self.items.insert(0, self._chunk())

    def _tokens(self, at: int, spans: int, tokens: int) -> EngineFault | None:
        ids = at + _SPAN.size * spans
        logprobs = ids + 4 * tokens
        told = list(_SPAN.iter_unpack(self._data[at:ids]))
        if sum(count for count, _ in told) != tokens:
            return EngineFault(f"the engine sent {tokens} tokens with versions for {sum(count for count, _ in told)}")
        self._spans += told
        if tokens:
            self._ids.append(self._data[ids:logprobs])
            self._logprobs.append(self._data[logprobs : logprobs + 4 * tokens])
        return None

    def _chunk(self) -> TokenChunk:
        tokens = np.frombuffer(b"".join(self._ids), _ID)
        versions = {version for _, version in self._spans}
        if len(versions) == 1:
            column = np.full(len(tokens), versions.pop(), np.int32)
        else:
            spans = np.array(self._spans, np.int64).reshape(-1, 2)
            column = np.repeat(spans[:, 1].astype(np.int32), spans[:, 0])
        return TokenChunk(tokens, np.frombuffer(b"".join(self._logprobs), _LOGPROB), column, _FINISH[self._finish])
