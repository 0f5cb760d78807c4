"""Chunks out of an engine's answer, a burst at a time: what has arrived together is one chunk, since each costs its readers as much as
200 tokens. Invariant: nothing is lost before a fault: what came in front of it is told first."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import aiohttp
import orjson

from gyre_hpc.engines.protocol import EngineFault, TokenChunk, merged


async def chunks(content: aiohttp.StreamReader, parse: Callable[[bytes], TokenChunk | None]) -> AsyncGenerator[TokenChunk, None]:
    """Chunks until one with `finish`, or the end of the stream. `parse`: a line, without its end -> its chunk, if it has one."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for item in merged(_parsed(lines, parse)):
            if isinstance(item, BaseException):
                raise item
            yield item
            if item.finish is not None:
                return


def _parsed(lines: list[bytes], parse: Callable[[bytes], TokenChunk | None]) -> list[TokenChunk | BaseException]:
    items: list[TokenChunk | BaseException] = []
    for line in lines:
        try:
            chunk = parse(line)
        except (EngineFault, orjson.JSONDecodeError) as error:
            return [*items, error]
        if chunk is not None:
            items.append(chunk)
    return items
