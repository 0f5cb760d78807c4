"""A unix socket that stands for the gateway on a node where the gateway's own is not to be had: bytes are pumped to its TCP address.

Invariants: bytes are neither read nor changed; a half-closed side stays half-closed on the other; back-pressure goes through (a slow
reader slows the writer); when either side breaks, both are aborted at once. A unix socket has no reset, so a reader learns of a break by
the missing end of its chunked body, which no HTTP client takes for a proper end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

_PIECE = 1 << 16


@contextlib.asynccontextmanager
async def relay(url: str) -> AsyncIterator[Path]:
    """Serve a unix socket (in a short private folder of the node) for `http://host:port` until the block is left; yields its path."""
    address = urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    open_ones: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await _join(reader, writer, host, port)
        finally:
            open_ones.discard(task)

    with tempfile.TemporaryDirectory(prefix="gyre-relay-") as folder:
        path = Path(folder) / "gateway.sock"
        server = await asyncio.start_unix_server(serve, path, limit=_PIECE)
        try:
            yield path
        finally:
            server.close()
            for task in open_ones:
                task.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)


@contextlib.asynccontextmanager
async def local_socket(own: Path, url: str) -> AsyncIterator[Path]:
    """The gateway's unix socket if it can be reached from this node (a shared file system shows it everywhere), else a relay's."""
    if answers(own):
        yield own
        return
    async with relay(url) as path:
        yield path


def answers(path: Path) -> bool:
    """Whether somebody listens on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection(host, port, limit=_PIECE)
    except OSError:
        writer.transport.abort()
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, far_writer))
            both.create_task(_pump(far_reader, writer))
    except* OSError:
        pass  # one side broke: the other must not look as if it had ended well
    finally:
        writer.transport.abort()
        far_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    await writer.drain()
