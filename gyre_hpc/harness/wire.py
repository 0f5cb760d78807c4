"""Anthropic Messages over HTTP/1.1 by hand: one connection, chunked answers, server-sent events.

Invariant: `Reply` exists only for a stream that came to its `message_stop`; everything else is `Broken` (worth the same request again) or
`Refused` (not). Standard library only, and little of it: see main.py.
"""

from __future__ import annotations

import json
import time
from _socket import AF_INET, AF_UNIX, SOCK_STREAM, getaddrinfo, socket
from collections.abc import Iterator

TYPE_CHECKING = False  # typing itself is never imported at run time: 8 ms
if TYPE_CHECKING:
    from typing import Any

FIRST_BYTE = 361.0
"""Seconds until the first byte of an answer (Claude Code's limit), and between any two."""
ATTEMPTS = 11
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


class Broken(Exception):
    """The call did not come to its end: a reset, an early end, a server error, an `error` event. `after`: seconds to wait, or None."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class Refused(Exception):
    """The server won't do it: a status that repeating does not change."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class Reply:
    """One assistant message: Anthropic content blocks as the client keeps them, why it stopped, its usage."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, object]] = []
        self.stop_reason = ""
        self.usage: dict[str, object] = {}

    def text(self) -> str:
        return "".join(str(block["text"]) for block in self.blocks if block["type"] == "text")

    def tool_uses(self) -> list[dict[str, object]]:
        return [block for block in self.blocks if block["type"] == "tool_use"]


class Client:
    """Calls to one gateway. `base`: http://host[:port][/prefix]; `unix`: path of a unix socket that stands for the host, or empty."""

    def __init__(self, base: str, unix: str) -> None:
        scheme, _, rest = base.partition("://")
        if scheme != "http" or not rest:
            raise ValueError(f"ANTHROPIC_BASE_URL = {base!r}: http://host[:port][/prefix]")
        self.host, slash, prefix = rest.partition("/")
        self.prefix = (slash + prefix).rstrip("/")
        self.unix = unix
        self._socket: socket | None = None
        self._buffer = b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def messages(self, body: bytes, headers: list[str], drop_after: int = 0) -> Reply:
        """One call, repeated byte for byte while it breaks. `drop_after` > 0: hang up after so many events, once, and repeat.

        Raises Refused at once, Broken when the attempts are used up.
        """
        request = self._request(body, headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._once(request, drop_after)
            except (OSError, ValueError, Broken) as error:
                self.close()
                if drop_after:
                    drop_after = 0
                    continue
                if attempt == ATTEMPTS:
                    raise Broken(f"{attempt} attempts: {error}") from None
                after = error.after if isinstance(error, Broken) else None
                time.sleep(min(60.0, after) if after is not None else min(30.0, 0.25 * 2 ** (attempt - 1)))
        raise AssertionError("unreachable")

    def _request(self, body: bytes, headers: list[str]) -> bytes:
        lines = [f"POST {self.prefix}/v1/messages?beta=true HTTP/1.1", f"Host: {self.host}", f"Content-Length: {len(body)}", *headers]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _once(self, request: bytes, drop_after: int) -> Reply:
        self._send(request)
        status, headers = self._head()
        chunks = self._chunks(headers)
        if status != 200:
            text = b"".join(chunks).decode(errors="replace")
            if status in RETRIED:
                after = headers.get("retry-after", "")
                raise Broken(f"HTTP {status}: {text[:200]}", float(after) if after.replace(".", "", 1).isdigit() else None)
            raise Refused(status, text)
        reply = self._reply(_events(chunks), drop_after)
        for _ in chunks:  # up to the last chunk, so that the connection can be used again
            pass
        if headers.get("connection", "").lower() == "close":
            self.close()
        return reply

    def _reply(self, events: Iterator[dict[str, Any]], drop_after: int) -> Reply:
        reply, partial = Reply(), {}
        for number, event in enumerate(events, 1):
            kind = event["type"]
            if kind == "error":
                raise Broken(f"error event: {json.dumps(event.get('error'))[:300]}")
            if kind == "message_start":
                reply.usage.update(event["message"].get("usage") or {})
            elif kind == "content_block_start":
                reply.blocks.append(dict(event["content_block"]))
                partial[event["index"]] = ""
            elif kind == "content_block_delta":
                _extend(reply.blocks[event["index"]], event["delta"], partial, event["index"])
            elif kind == "content_block_stop" and reply.blocks[event["index"]]["type"] == "tool_use":
                reply.blocks[event["index"]]["input"] = _arguments(partial[event["index"]])
            elif kind == "message_delta":
                reply.stop_reason = event["delta"].get("stop_reason") or ""
                reply.usage.update(event.get("usage") or {})
            elif kind == "message_stop" and not drop_after:
                return reply
            if drop_after and number >= drop_after:
                raise Broken("dropped on purpose")
        raise Broken("the stream ended before message_stop")

    def _send(self, request: bytes) -> None:
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        try:
            self._socket.sendall(request)
        except OSError:  # an idle connection that the server closed meanwhile
            self.close()
            self._connect()
            self._socket.sendall(request)

    def _connect(self) -> None:
        if self.unix:
            made = socket(AF_UNIX, SOCK_STREAM)
            made.settimeout(FIRST_BYTE)
            made.connect(self.unix)
        else:
            name, _, port = self.host.partition(":")
            address = getaddrinfo(name, int(port or 80), AF_INET, SOCK_STREAM)[0][4]
            made = socket(AF_INET, SOCK_STREAM)
            made.settimeout(FIRST_BYTE)
            made.connect(address)
        self._socket, self._buffer = made, b""

    def _more(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(65536)
        if not data:
            raise Broken("the connection ended early")
        self._buffer += data

    def _line(self) -> bytes:
        while True:
            line, end, rest = self._buffer.partition(b"\r\n")
            if end:
                self._buffer = rest
                return line
            self._more()

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _head(self) -> tuple[int, dict[str, str]]:
        while True:
            status = int(self._line().split()[1])
            headers = {}
            while line := self._line():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            if status >= 200:
                return status, headers

    def _chunks(self, headers: dict[str, str]) -> Iterator[bytes]:
        """The body, piece by piece; ends at its proper end only."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(self._line().split(b";")[0], 16):
                yield self._take(size)
                self._line()
            while self._line():
                pass
        elif "content-length" in headers:
            yield self._take(int(headers["content-length"]))
        else:
            raise Broken("an answer without length")


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, parsed."""
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield json.loads(line[5:])


def _extend(block: dict[str, object], delta: dict[str, str], partial: dict[int, str], index: int) -> None:
    kind = delta["type"]
    if kind == "input_json_delta":
        partial[index] += delta["partial_json"]
    elif kind == "text_delta":
        block["text"] = str(block.get("text") or "") + delta["text"]
    elif kind == "thinking_delta":
        block["thinking"] = str(block.get("thinking") or "") + delta["thinking"]
    elif kind == "signature_delta":
        block["signature"] = delta["signature"]


def _arguments(raw: str) -> object:
    """Tool arguments as clients keep them: parsed, so re-serialised later; what is no JSON object is wrapped, the raw text kept."""
    try:
        value = json.loads(raw or "{}")
    except ValueError:
        return {"raw": raw}
    return value if isinstance(value, dict) else {"raw": raw}
