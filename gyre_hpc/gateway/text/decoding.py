"""Tokens to text, as they come.

Invariant: whatever the chunks, what a decoder says all together is what the tokenizer makes of the whole sequence, half characters held
back until they are whole or the turn is over. Byte-level tokenizers (of most larger models) are read from a table of bytes: a chunk
costs its own tokens. Others go through the tokenizer, which has to read a little of what came before each time.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import orjson
from tokenizers import Tokenizer

from gyre_hpc.engines.protocol import Ids
from gyre_hpc.gateway.text.encoding import spelled

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The text of one turn's tokens."""

    def feed(self, tokens: Ids) -> str:
        """The text that is certain after these tokens; without the stop token at their end."""
        ...

    def finish(self) -> str:
        """The text held back, half characters replaced."""
        ...


class TokenBytes:
    """The bytes of tokens, read as they are met; an unknown id has none.

    One buffer and two columns in place of an object for each token: the tokens of a text lie all over a vocabulary, and touching 6,000
    objects three times costs more than copying their bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        size = max(tokenizer.get_vocab().values(), default=-1) + 2  # a vocabulary may have holes; the last place is nobody's
        self._lengths = np.full(size, -1, np.int32)
        self._starts = np.zeros(size, np.int32)
        self._text = np.zeros(1 << 16, np.uint8)
        self._used = 0

    def joined(self, tokens: Ids) -> bytes:
        """The bytes of these tokens, ids from 0 on, one after the other."""
        if not len(tokens):
            return b""
        ids = np.minimum(tokens, len(self._lengths) - 1)
        lengths = self._lengths.take(ids)
        if lengths.min() < 0:
            self._learn(ids[lengths < 0])
            lengths = self._lengths.take(ids)
        ends = lengths.cumsum(dtype=np.int64)
        at = np.arange(ends[-1])
        at += np.repeat(self._starts.take(ids) - ends + lengths, lengths)
        return self._text.take(at).tobytes()

    def _learn(self, tokens: Ids) -> None:
        for token in np.unique(tokens).tolist():
            data = spelled(self._tokenizer.id_to_token(token))
            if self._used + len(data) > len(self._text):
                self._text = np.concatenate([self._text, np.zeros(len(self._text) + len(data), np.uint8)])
            self._text[self._used : self._used + len(data)] = np.frombuffer(data, np.uint8)
            self._starts[token], self._lengths[token] = self._used, len(data)
            self._used += len(data)


class ByteDecoder:
    """Decoder of a byte-level tokenizer."""

    def __init__(self, table: TokenBytes, stop_ids: frozenset[int]) -> None:
        self._table = table
        self._stop = stop_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Ids) -> str:
        """See Decoder."""
        if len(tokens) and int(tokens[-1]) in self._stop:
            tokens = tokens[:-1]
        return self._utf8.decode(self._table.joined(tokens))

    def finish(self) -> str:
        """See Decoder."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Decoder of any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop_ids
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, tokens: Ids) -> str:
        """See Decoder."""
        self._ids += tokens.tolist()
        if self._ids and self._ids[-1] in self._stop:
            self._ids.pop()
        fresh = self._fresh()
        if not fresh or fresh.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return fresh

    def finish(self) -> str:
        """See Decoder."""
        fresh = self._fresh()
        self._prefix = self._read = len(self._ids)
        return fresh

    def _fresh(self) -> str:
        known = self._tokenizer.decode(self._ids[self._prefix : self._read], skip_special_tokens=False)
        return str(self._tokenizer.decode(self._ids[self._prefix :], skip_special_tokens=False)[len(known) :])


def decoders(tokenizer: Tokenizer, stop_ids: Sequence[int]) -> Callable[[], Decoder]:
    """Makes a decoder for each turn."""
    stop = frozenset(stop_ids)
    settings = orjson.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    if settings.get("type") != "ByteLevel":
        return lambda: WindowDecoder(tokenizer, stop)
    table = TokenBytes(tokenizer)
    return lambda: ByteDecoder(table, stop)
