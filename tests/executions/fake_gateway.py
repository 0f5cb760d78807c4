"""A fake gateway at the outer edge: Anthropic Messages by a script instead of a policy, and the control API from a list of work.

Everything on the harness's side of it is real. `script(body, call)` gives the content blocks of the answer to the call'th request
(from 0), or an HTTP response, or `Cut` for a stream that ends after so many events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Blocks = list[dict[str, Any]]


@dataclass
class Cut:
    """Send the first `events` events of `blocks`, then end: cleanly (the last chunk is sent) or by closing the connection."""

    blocks: Blocks
    events: int
    clean: bool


@dataclass
class Seen:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


Script = Callable[[dict[str, Any], int], Blocks | Cut | web.Response]


@dataclass
class FakeGateway:
    """What was asked and reported; `socket` and `url` while it runs."""

    script: Script
    work: list[dict[str, Any]] = field(default_factory=list)
    socket: Path = Path()
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str = ""

    async def messages(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read()))
        answer = self.script(self.seen[-1].body, len(self.seen) - 1)
        if isinstance(answer, web.Response):
            return answer
        cut = answer if isinstance(answer, Cut) else None
        events = _events(cut.blocks if cut else answer, self.stop_reason)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in events[: cut.events] if cut else events:
            with contextlib.suppress(ConnectionError):  # a harness that hangs up in mid-stream
                await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        if cut and not cut.clean and request.transport is not None:
            request.transport.close()
            return response
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    async def give_work(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if not self.work:
            await asyncio.sleep(min(asked["wait"], 0.2))
        given, self.work = self.work[: asked["slots"]], self.work[asked["slots"] :]
        return web.json_response(given)

    async def take_end(self, request: web.Request) -> web.StreamResponse:
        self.ends[int(request.match_info["id"])] = await request.json()
        self.reported.set()
        return web.json_response({})

    async def take_loss(self, request: web.Request) -> web.StreamResponse:
        self.losses.append((int(request.match_info["id"]), await request.json()))
        self.reported.set()
        return web.json_response({})

    async def until_reported(self, count: int, deadline: float = 120.0) -> None:
        async with asyncio.timeout(deadline):
            while len(self.ends) + len(self.losses) < count:
                self.reported.clear()
                await self.reported.wait()


@contextlib.asynccontextmanager
async def fake_gateway(script: Script, work: list[dict[str, Any]] | None = None) -> AsyncIterator[FakeGateway]:
    """Serve on a unix socket and on TCP."""
    fake = FakeGateway(script, work or [])
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/control/work", fake.give_work)
    app.router.add_post("/control/executions/{id}/end", fake.take_end)
    app.router.add_post("/control/executions/{id}/lost", fake.take_loss)
    app.router.add_post("/{path:.*}", fake.messages)
    runner = web.AppRunner(app)
    await runner.setup()
    with tempfile.TemporaryDirectory(prefix="gyre-fake-") as folder:
        fake.socket = Path(folder) / "g.sock"
        await web.UnixSite(runner, str(fake.socket)).start()
        tcp = web.TCPSite(runner, "127.0.0.1", 0)
        await tcp.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[-1][1]}"
        try:
            yield fake
        finally:
            await runner.cleanup()


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


def bash(command: str, number: int = 1) -> dict[str, Any]:
    return use("bash", number, command=command)


def _events(blocks: Blocks, stop_reason: str) -> list[dict[str, Any]]:
    """A message as the protocol streams it, every block in two deltas; `raw` in a block stands for its arguments' text."""
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"usage": {"input_tokens": 7}}}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            start, whole, kind, key = {"type": "text", "text": ""}, block["text"], "text_delta", "text"
        else:
            start = {"type": "tool_use", "id": block["id"], "name": block["name"], "input": {}}
            whole, kind, key = block.get("raw", json.dumps(block["input"])), "input_json_delta", "partial_json"
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        half = len(whole) // 2
        events += [
            {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: part}} for part in (whole[:half], whole[half:])
        ]
        events.append({"type": "content_block_stop", "index": index})
    reason = stop_reason or ("tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn")
    events.append({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 5}})
    events.append({"type": "message_stop"})
    return events
