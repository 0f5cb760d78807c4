"""An answer read in bursts is the answer, wherever the network cuts it."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import aclosing

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gyre_hpc.engines import frames
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, EngineUnreachable, GenerateRequest, Sampling, TokenChunk
from gyre_hpc.engines.streaming import Lines, broken, chunks, session
from gyre_hpc.engines.torch_engine import TorchClient


class Bursts:
    """Fake of a response's content: these bytes, as they arrived."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.randrange(6))))
        self.parts = [data[first:last] for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    async def iter_any(self):  # type: ignore[no-untyped-def]
        for part in self.parts:
            await asyncio.sleep(0)
            yield part


def parse(line: bytes) -> TokenChunk | None:
    """{t, l, v, f}, a blank line, or {error}."""
    if not line:
        return None
    item = orjson.loads(line)
    if "error" in item:
        raise EngineFault(item["error"])
    return TokenChunk(item["t"], item["l"], item["v"], item["f"])


def line(tokens: list[int], finish: str | None = None) -> bytes:
    return orjson.dumps({"t": tokens, "l": [-1.0] * len(tokens), "v": [2] * len(tokens), "f": finish}) + b"\n"


async def read(content: Bursts) -> tuple[list[TokenChunk], Exception | None]:
    found: list[TokenChunk] = []
    stream: aiohttp.StreamReader = content  # type: ignore[assignment]
    try:
        async with aclosing(chunks(stream, Lines(parse))) as items:
            async for chunk in items:
                found.append(chunk)
    except EngineFault as error:
        return found, error
    return found, None


@pytest.mark.parametrize("seed", range(20))
async def test_any_cut_gives_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    said = [[rng.randrange(99) for _ in range(rng.randrange(1, 5))] for _ in range(6)]
    data = b"\n".join(line(tokens) for tokens in said) + line([7], "stop") + line([8])
    found, error = await read(Bursts(data, rng))
    assert error is None
    assert [token for chunk in found for token in chunk.tokens.tolist()] == [*(token for tokens in said for token in tokens), 7]
    assert [chunk.finish for chunk in found][-1] == "stop"
    assert {chunk.finish for chunk in found[:-1]} <= {None}


@pytest.mark.parametrize("broken", [b'{"error":"paused"}\n', b'{"t":[1\n'])
async def test_what_came_before_a_fault_is_told_first(broken: bytes) -> None:
    for seed in range(10):
        found, error = await read(Bursts(line([1, 2]) + line([3]) + broken + line([4]), random.Random(seed)))
        assert [token for chunk in found for token in chunk.tokens.tolist()] == [1, 2, 3]
        assert error is not None


async def test_a_connection_that_could_not_be_made_is_told_from_one_that_broke() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with session(1.0) as connections:
            with pytest.raises(aiohttp.ClientError) as refused:
                await connections.get(address)
    assert type(broken("the engine", refused.value)) is EngineUnreachable
    assert type(broken("the engine", aiohttp.ServerDisconnectedError())) is EngineFault
    assert str(broken("the engine", TimeoutError("late"))) == "connection to the engine: TimeoutError late"


@pytest.mark.parametrize("ends", [True, False])
async def test_a_connection_is_used_again_by_who_stops_reading_at_the_last_chunk(ends: bool) -> None:
    """And an engine that does not end its answer loses it, and nothing else."""
    peers: set[object] = set()
    over = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        response = web.StreamResponse(headers={"Content-Type": frames.MEDIA})
        await response.prepare(request)
        await response.write(frames.frame(TokenChunk([4], [-0.5], [1], "stop")))
        if not ends:
            await over.wait()
        return response

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    async with TestServer(app) as server:
        client = TorchClient(EngineAddress("torch", str(server.make_url("")).rstrip("/"), 1, 64))
        for _ in range(3):
            async with aclosing(client.generate(GenerateRequest("r", [1], Sampling(4)))) as stream:
                assert await anext(stream) == TokenChunk([4], [-0.5], [1], "stop")
        assert len(peers) == (1 if ends else 3)
        over.set()
        await client.close()
