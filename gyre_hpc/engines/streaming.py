"""One call to an engine, and chunks out of its answer, a burst at a time: what has arrived together is one chunk, since each costs its
readers as much as 200 tokens. Invariants: a connection is used again after an answer that was read to its end, and closed after any other,
which cancels the call; nothing is lost before a fault: what came in front of it is told first; whatever an engine sends, a chunk has as
many log-probs and versions as tokens, ids that are not negative, and log-probs that are finite."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np

from gyre_hpc.engines.names import connector
from gyre_hpc.engines.protocol import EngineFault, EngineUnreachable, GenerateRequest, Ids, Logprobs, TokenChunk, merged

LONGEST_LINE = 1 << 26
"""Bytes of a line from which on it is damage: a server may echo the prompt's ids."""
REST = 0.1
"""Seconds between the last chunk of an answer and its end."""
_BUFFER = 1 << 20
"""Bytes of an answer that may wait to be read before the connection is held up."""


def session(keepalive: float, silence: float | None = None, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Connections to one engine. `keepalive`: seconds that an idle one is kept; `silence`: seconds without a byte that end a call."""
    return aiohttp.ClientSession(
        connector=connector(limit=0, keepalive_timeout=keepalive),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=silence),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        read_bufsize=_BUFFER,
    )


def broken(engine: str, error: Exception) -> EngineFault:
    """What is raised for a connection to `engine` that broke, or could not be made."""
    never = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return (EngineUnreachable if never else EngineFault)(f"connection to {engine}: {type(error).__name__} {error}")


@dataclass(frozen=True)
class Question:
    """One call as an engine is asked: the body, headers of its own, and what reads the answer of status 200."""

    body: bytes
    reader: Callable[[aiohttp.ClientResponse], Reader]
    headers: Mapping[str, str] | None = None


class StreamingClient(ABC):
    """What the clients of all engines have in common (`EngineClient`); one per engine and event loop, with pooled connections."""

    def __init__(self, url: str, name: str, connections: aiohttp.ClientSession) -> None:
        """`url` of calls; `name` of the engine in messages."""
        self._url, self._name, self._session = url, name, connections

    @abstractmethod
    def _question(self, request: GenerateRequest) -> Question:
        """How it asks. Raises RequestRefused for what it can't ask."""

    @abstractmethod
    def _refusal(self, status: int, reason: str) -> Exception:
        """What another status than 200 means."""

    def _lost(self, error: Exception) -> EngineFault:
        """What a connection that broke means."""
        return broken(self._name, error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks until one with `finish`. Raises EngineFault; closing the iterator closes the connection, which cancels."""
        asked = self._question(request)
        try:
            async with self._session.post(self._url, data=asked.body, headers=asked.headers) as response:
                if response.status != 200:
                    raise self._refusal(response.status, (await response.text())[:300])
                try:
                    async with aclosing(chunks(response.content, asked.reader(response))) as found:
                        async for chunk in found:
                            if chunk.finish is not None:
                                await read_rest(response)
                            yield chunk
                            if chunk.finish is not None:
                                return
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        raise EngineFault(f"{self._name}: the answer ended early")

    async def close(self) -> None:
        """Its connections."""
        await self._session.close()


class Reader(Protocol):
    """Reads one answer: `Lines`, or `frames.Frames`."""

    def feed(self, data: bytes) -> list[TokenChunk | EngineFault]:
        """What is whole after these bytes; a fault is the last of it."""
        ...


class Lines:
    """Reads an answer in lines. `parse`: a line, without its end -> its chunk, if it has one; raises EngineFault, or what damage raises."""

    def __init__(self, parse: Callable[[bytes], TokenChunk | None]) -> None:
        self._parse = parse
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[TokenChunk | EngineFault]:
        """See Reader."""
        if b"\n" not in data:
            self._rest.append(data)
            self._size += len(data)
            return [EngineFault(f"the engine sent a line of more than {LONGEST_LINE} bytes")] if self._size > LONGEST_LINE else []
        *lines, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest, self._size = [rest], len(rest)
        items: list[TokenChunk | EngineFault] = []
        for line in lines:
            try:
                chunk = self._parse(line)
            except EngineFault as error:
                return [*items, error]
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
                return [*items, EngineFault(f"the engine sent a line of unknown form ({type(error).__name__} {error}): {line[:200]!r}")]
            if chunk is not None:
                items.append(chunk)
        return items


def ids_of(values: Sequence[Any]) -> Ids:
    """JSON numbers as token ids. Raises EngineFault for what is none."""
    found = np.asarray(values or np.zeros(0, np.int32))
    if found.dtype.kind != "i" or found.ndim != 1 or (found.size and not 0 <= found.min() <= found.max() < 1 << 31):
        raise EngineFault(f"the engine sent what are no token ids: {str(values)[:100]}")
    return found.astype(np.int32)


def logprobs_of(values: Sequence[Any]) -> Logprobs:
    """JSON numbers as log-probs. Raises EngineFault for what is none."""
    found = np.asarray(values or np.zeros(0))
    if found.dtype.kind not in "if" or found.ndim != 1:
        raise EngineFault(f"the engine sent what are no log-probs: {str(values)[:100]}")
    return found.astype(np.float32)


async def chunks(content: aiohttp.StreamReader, reader: Reader) -> AsyncGenerator[TokenChunk, None]:
    """Chunks until one with `finish`, or the end of the stream. Raises EngineFault."""
    async for data in content.iter_any():
        for item in merged(reader.feed(data)):
            if isinstance(item, BaseException):
                raise item
            yield sound(item)
            if item.finish is not None:
                return


async def read_rest(response: aiohttp.ClientResponse) -> None:
    """Read what is behind the last chunk, for the connection to be used again. Before that chunk is given on: who has it asks for nothing
    more. An engine that does not end its answer within REST loses the connection, not the chunk."""
    if not response.content.at_eof():
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(REST):
                await response.read()


def sound(chunk: TokenChunk) -> TokenChunk:
    """The chunk, if it can be recorded. Raises EngineFault."""
    tokens, logprobs = chunk.tokens, chunk.logprobs
    if not len(tokens) == len(logprobs) == len(chunk.versions) or tokens.ndim != 1 or logprobs.ndim != 1:
        raise EngineFault(f"the engine sent {len(tokens)} tokens with {len(logprobs)} log-probs")
    if len(tokens) and not (tokens.min() >= 0 and np.isfinite(logprobs).all()):
        raise EngineFault("the engine sent ids below 0 or log-probs that are not finite")
    return chunk
