"""The relay carries whole conversations, half-closes, breaks and back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from gyre_hpc.executions.relay import answers, local_socket, relay

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def far(handler: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_both_ways_with_half_closes() -> None:
    async def echo_after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        writer.close()

    async with far(echo_after_the_end) as url, relay(url) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"abc" * 100_000)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b"cba" * 100_000
    assert not path.exists()


async def test_many_at_once() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())

    async def ask(path: Path, number: int) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        for _ in range(3):
            writer.write(b"n%d\n" % number)
            answer = await reader.readline()
        writer.close()
        return answer

    async with far(shout) as url, relay(url) as path:
        answered = await asyncio.wait_for(asyncio.gather(*(ask(path, number) for number in range(100))), 20)
    assert answered == [b"N%d\n" % number for number in range(100)]


async def test_a_break_on_the_far_side_ends_the_near_one() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"partial")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async with far(reset) as url, relay(url) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"go\n")
        assert await asyncio.wait_for(reader.read(), 10) == b"partial"


async def test_a_break_on_the_near_side_ends_the_far_one() -> None:
    ended = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    async with far(wait_for_the_end) as url, relay(url) as path:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"half")
        await writer.drain()
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 10)


async def test_nobody_there() -> None:
    async with relay("http://127.0.0.1:1") as path:
        reader, _ = await asyncio.open_unix_connection(path)
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_the_own_socket_is_used_only_where_it_answers(tmp_path: Path) -> None:
    own = tmp_path / "own.sock"
    assert not answers(own)
    async with local_socket(own, "http://127.0.0.1:1") as path:
        assert path != own
        assert answers(path)
    server = await asyncio.start_unix_server(lambda r, w: None, own)
    async with local_socket(own, "http://127.0.0.1:1") as path:
        assert path == own
    server.close()
