"""The Anthropic Messages dialect: request bodies in, server-sent events or one JSON message out. Pure: no sockets, no clock.

Invariants: the order of events is message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta with
stop_reason and usage, message_stop, and pings anywhere between; block indices are dense; the streamed blocks and the plain message of one
call are the same blocks. Unknown fields are accepted; what a text model can't read is refused with 400 `invalid_request_error`.
Usage is the truth (harnesses compact by it). Sampling parameters of the harness are ignored: the run's configuration rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import orjson

from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects.bodies import Memory, Shape
from gyre_hpc.gateway.dialects.canonical import (
    Conversation,
    Message,
    UnsupportedContent,
    head_of,
    known_of,
    normalise_message,
    normalise_messages,
    normalise_system,
    normalise_tools,
)
from gyre_hpc.gateway.dialects.dialect import Asked, read_request, sort_events
from gyre_hpc.gateway.dialects.openai import digest_of
from gyre_hpc.gateway.harnesses import GENERIC, Harness, harness_of, header
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, blocks_of

AGENT_HEADER = "x-claude-code-agent-id"
"""Sent by sub-agents only, with an id of the sub-agent."""
ROLES = ("user", "assistant", "system")
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    529: "overloaded_error",
}


def conversation_of(body: Mapping[str, Any], harness: Harness = GENERIC) -> Conversation:
    """The canonical conversation of a Messages request. Raises BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: at least one message is required")
    if not all(isinstance(message, Message) or (isinstance(message, dict) and message.get("role") in ROLES) for message in messages):
        raise BadRequest("messages: each one needs a role (user, assistant or system)")
    if not isinstance(body.get("system"), str | list | None):
        raise BadRequest("system: a string or a list of blocks")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("tools: a list of objects")
    choice = body.get("tool_choice")
    usable = [] if isinstance(choice, dict) and choice.get("type") == "none" else [tool for tool in tools if "name" in tool]
    try:
        head = head_of(normalise_system(body.get("system")), normalise_tools(usable))
        turns = (*known_of(messages), *normalise_messages(messages))
    except UnsupportedContent as error:
        raise BadRequest(str(error)) from None
    if turns and turns[-1].role == "assistant":
        raise BadRequest("the conversation must end with a user message: this model does not continue a turn that is begun")
    return Conversation(head, turns, harness)


def call_request(
    raw: bytes, body: Mapping[str, Any], agent: str, harness: Harness = GENERIC, read: Callable[[], Conversation] | None = None
) -> CallRequest:
    """What the recorder needs of a request; `raw`: what a retry has too; `read` makes its conversation. Raises BadRequest."""
    max_tokens = body.get("max_tokens")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise BadRequest("max_tokens: a positive integer is required")
    conversation = read() if read else conversation_of(body, harness)
    return CallRequest(conversation, max_tokens, agent, digest_of(Messages.path, agent, raw))


@cache
def _shape(harness: Harness) -> Shape:
    return Shape(Messages.path, "messages", partial(_turns, harness=harness))


def _turns(items: Sequence[Any], harness: Harness) -> list[Message]:
    """A turn of each message, blank ones too."""
    if not all(isinstance(item, Message) or item.get("role") in ROLES for item in items):
        raise BadRequest("messages: each one needs a role")
    return [item if isinstance(item, Message) else normalise_message(item["role"], item.get("content")) for item in items]


def error_body(status: int, message: str) -> bytes:
    """The body of a refused or failed request."""
    return orjson.dumps({"type": "error", "error": {"type": ERROR_TYPES.get(status, "api_error"), "message": message}})


def error_event(message: str, status: int = 500) -> bytes:
    """The event that tells that a stream broke after its headers were sent."""
    return b"event: error\ndata: " + error_body(status, message) + b"\n\n"


def message_body(events: Iterable[Event], model: str) -> bytes:
    """The plain answer of a finished call."""
    started, pieces, ended = sort_events(events)
    blocks = [{**block, "signature": ""} if block["type"] == "thinking" else block for block in blocks_of(pieces)]
    message = _message(started, model)
    message.update(content=blocks, stop_reason=ended.stop_reason, usage=_usage(started.prompt_tokens, ended.tokens))
    return orjson.dumps(message)


def model_entry(name: str) -> dict[str, Any]:
    """The policy in a list of models."""
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


class Messages:
    """The endpoint of the dialect."""

    path = "/v1/messages"
    spent = 400

    def ask(self, raw: bytes, headers: Mapping[str, str], model: str, memory: Memory | None = None) -> Asked:
        """See Dialect."""
        harness = harness_of(headers)
        read = read_request(raw, _shape(harness), harness, memory, conversation_of)
        call = call_request(read.digest, read.fields, header(headers, AGENT_HEADER), harness, read.conversation)
        return Asked(call, bool(read.fields.get("stream")), MessagesAnswer(str(read.fields.get("model") or model)))

    def error_body(self, status: int, message: str, error: Exception | None = None) -> bytes:
        """See Dialect."""
        return error_body(status, message)


class MessagesAnswer:
    """See Answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._encoder = SseEncoder(model)

    def encode(self, events: Iterable[Event]) -> bytes:
        return self._encoder.encode(events)

    def ping(self) -> bytes:
        return PING

    def broken(self, message: str, final: bool = False) -> bytes:
        """A reset alone is repeated as a stream, eleven times in three minutes; behind an error event Claude Code gives streaming up."""
        return error_event(message, 400) if final else b""

    def whole(self, events: Iterable[Event]) -> bytes:
        return message_body(events, self._model)


class SseEncoder:
    """The events of one call as server-sent events. `encode` keeps track of the block that is open."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._index = -1
        self._open = ""
        self._prompt_tokens = 0

    def encode(self, events: Iterable[Event]) -> bytes:
        """The bytes of these events, which follow those encoded before."""
        return b"".join(part for event in events for part in self._event(event))

    def _event(self, event: Event) -> list[bytes]:
        if isinstance(event, Started):
            self._prompt_tokens = event.prompt_tokens
            return [_sse("message_start", message=_message(event, self._model)), PING]
        if isinstance(event, Ended):
            delta = {"stop_reason": event.stop_reason, "stop_sequence": None}
            usage = _usage(self._prompt_tokens, event.tokens)
            return [*self._close(), _sse("message_delta", delta=delta, usage=usage), _sse("message_stop")]
        if isinstance(event, TextPiece):
            opened = self._ensure("text", {"type": "text", "text": ""})
            return [*opened, self._delta({"type": "text_delta", "text": event.text})]
        if isinstance(event, ThinkingPiece):
            opened = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*opened, self._delta({"type": "thinking_delta", "thinking": event.text})]
        opened = self._ensure("", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        arguments = orjson.dumps(event.input).decode()
        return [*opened, self._delta({"type": "input_json_delta", "partial_json": arguments}), *self._close()]

    def _ensure(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if kind and self._open == kind:
            return []
        closed = self._close()
        self._index += 1
        self._open = kind or "tool_use"
        return [*closed, _sse("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [_sse("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _sse("content_block_delta", index=self._index, delta=delta)


def _sse(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _message(started: Started, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{started.call:08x}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(started.prompt_tokens, 0),
    }


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"input_tokens": prompt, "output_tokens": sampled, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
