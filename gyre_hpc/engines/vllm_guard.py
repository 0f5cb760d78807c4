"""ASGI middleware inside vLLM's API server: who may ask, and under which weights an answer is sampled.

vLLM names the weight version of tokens only in the last chunk of a call, which a cancelled call never has; its control routes ask for no
key; and a call that arrives during a pause waits and then runs under the next weights. Hence, here:
- only paths below `/<GYRE_ENGINE_SECRET>` exist;
- a call is refused with 503 while paused, counted while it runs, and its response header `x-gyre-version` says the version that it runs
  under: the owner changes weights only when `GET /gyre` reports paused and nothing in flight;
- a call that pulls KV says under which version that was computed (`x-gyre-kv-version`) and is refused with 409 under another: vLLM would
  take it;
- every call's prefix cache is that of its version (the version is vLLM's cache salt), and of the time since the last `/gyre/forget`: the
  owner of a hand-over that may have gone wrong says that, and nothing cached before is found again;
- who accepts frames (frames.py) gets them in place of vLLM's events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gyre_hpc.engines import frames
from gyre_hpc.engines.vllm_wire import Translator

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SECRET = "GYRE_ENGINE_SECRET"
VERSION = "GYRE_ENGINE_VERSION"
HEADER = "x-gyre-version"
KV_HEADER = "x-gyre-kv-version"
OTHER_VERSION = 409


class Guard:
    """One per server process (vLLM runs one API server here)."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._prefix = "/" + os.environ[SECRET]
        self._version = os.environ[VERSION]
        self._paused = False
        self._in_flight = 0
        self._forgotten = 0
        """Times."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if not path.startswith(self._prefix + "/"):
            await _answer(send, 404, {"error": "not found"})
            return
        path = path[len(self._prefix) :]
        inner = {**scope, "path": path, "raw_path": path.encode()}
        if path == "/gyre":
            await _answer(send, 200, {"version": int(self._version), "paused": self._paused, "in_flight": self._in_flight})
        elif path == "/gyre/version":
            self._version = str(int(scope["query_string"].decode()))
            await _answer(send, 200, {})
        elif path == "/gyre/forget":
            self._forgotten += 1
            await _answer(send, 200, {})
        elif path.startswith("/inference/"):
            await self._call(inner, receive, send)
        else:
            if path == "/pause":
                self._paused = True
            await self._app(inner, receive, send)
            if path == "/resume":
                self._paused = False

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._paused:
            await _answer(send, 503, {"error": "paused"})
            return
        version = self._version
        asked = dict(scope.get("headers", ()))
        pulled = asked.get(KV_HEADER.encode())
        if pulled is not None and pulled != version.encode():
            await _answer(send, OTHER_VERSION, {"error": f"weights are version {version}, the KV is of {pulled.decode()}"})
            return
        salt = b'{"cache_salt":"%s.%d",' % (version.encode(), self._forgotten)
        first = True

        async def salted() -> Message:
            nonlocal first
            message = await receive()
            if first and message.get("body"):
                first = False
                if message["body"].startswith(b"{"):
                    message = {**message, "body": salt + message["body"][1:]}
            return message

        translator: Translator | None = None

        async def stamped(message: Message) -> None:
            nonlocal translator
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (HEADER.encode(), version.encode())]
                if message["status"] == 200 and frames.MEDIA.encode() in asked.get(b"accept", b"") and _is_stream(headers):
                    translator = Translator(int(version))
                    headers = [(name, value) for name, value in headers if name.lower() not in (b"content-type", b"content-length")]
                    headers.append((b"content-type", frames.MEDIA.encode()))
                message["headers"] = headers
            elif translator is not None and message["type"] == "http.response.body":
                message = {**message, "body": translator.feed(message.get("body", b""))}
                if not message["body"] and message.get("more_body"):
                    return
            await send(message)

        self._in_flight += 1
        try:
            await self._app(scope, salted, stamped)
        finally:
            self._in_flight -= 1


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


async def _answer(send: Send, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
