"""The OpenAI Chat Completions dialect: request bodies in, chunks or one completion out. Pure: no sockets, no clock (`created` is 0).

Invariants: a stream is a chunk with the role, then text, reasoning and tool calls as they come, one chunk with finish_reason, one with
usage when `stream_options.include_usage` asks for it, and [DONE]; tool calls have dense indices; the streamed deltas add up to the plain
message. Unknown fields are accepted; what would change the answer and can't be done (stop, n > 1, logprobs, audio) is refused with 400.
Sampling parameters and response_format are not obeyed: the run's configuration rules. Rules of the canonical form, beside those of
openai.py, each with its test in tests/gateway/dialects/test_chat.py:
1. A message has one text: texts apart (before and after a tool call) are joined by a line break, as delivered and as it comes back.
2. Every `tool` message is a turn of its own with one result; `reasoning_content` (or `reasoning`) is a thought, which is not compared.
3. opencode writes the call of a tool that it does not have as one of `invalid`, {"tool", "error"}, its arguments lost; or in small letters
   where that is a tool. The error comes again as the call's result, so it means nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import orjson

from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects import openai
from gyre_hpc.gateway.dialects.bodies import Memory, Shape
from gyre_hpc.gateway.dialects.canonical import (
    Block,
    Conversation,
    Message,
    UnsupportedContent,
    normalise_message,
)
from gyre_hpc.gateway.dialects.dialect import Asked, read_request, sort_events
from gyre_hpc.gateway.harnesses import GENERIC, OPENCODE, Harness, harness_of
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, ToolPiece

PING = b": ping\n\n"
INVALID = "invalid"
"""What opencode calls the tool of a call that it could not run."""
DONE = b"data: [DONE]\n\n"
FINISH = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
ROLES = (*openai.SYSTEM_ROLES, "user", "assistant", "tool")
REFUSED = {
    "stop": "stop sequences are not supported: the policy ends its turn by itself; leave it out",
    "logprobs": "not supported; leave it out",
    "audio": "not supported: this model writes text only",
    "functions": "not supported; use tools",
}


class ChatCompletions(openai.Endpoint):
    """The endpoint of the dialect."""

    path = "/v1/chat/completions"
    spent = 404
    """What is answered with 400, 403 or 410 mini-swe-agent repeats for minutes; of 404 it knows, as the others do, that it is final."""

    def ask(self, raw: bytes, headers: Mapping[str, str], model: str, memory: Memory | None = None) -> Asked:
        """See Dialect."""
        harness = harness_of(headers)
        read = read_request(raw, _shape(harness), harness, memory, conversation_of)
        body = read.fields
        options = body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        call = call_request(read.digest, body, harness.agent(headers), harness, read.conversation)
        return Asked(call, bool(body.get("stream")), ChatAnswer(str(body.get("model") or model), usage))


def call_request(
    raw: bytes, body: Mapping[str, Any], agent: str, harness: Harness = GENERIC, read: Callable[[], Conversation] | None = None
) -> CallRequest:
    """What the recorder needs of a request; `raw`: what a retry has too; `read` makes its conversation. Raises BadRequest."""
    openai.refuse(body, REFUSED)
    if body.get("n") not in (None, 1):
        raise BadRequest("n: only 1 is supported; call again for another answer")
    limit = openai.limit_of(body, "max_completion_tokens", "max_tokens")
    digest = openai.digest_of(ChatCompletions.path, agent, raw)
    conversation = read() if read else conversation_of(body, harness)
    offered = {tool["name"] for tool in conversation.head.tools}

    def comes_back(reply: Message) -> Message:
        return delivered(reply, offered if harness is OPENCODE else None)

    return CallRequest(conversation, limit, agent, digest, comes_back)


def conversation_of(body: Mapping[str, Any], harness: Harness = GENERIC) -> Conversation:
    """The canonical conversation of a request. Raises BadRequest."""
    messages = openai.items_of(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages: at least one message is required")
    if not all(isinstance(message, Message) or message.get("role") in ROLES for message in messages):
        raise BadRequest(f"messages: each one needs a role ({', '.join(ROLES)})")
    tools = openai.objects(body.get("tools"), "tools")
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    usable = [] if body.get("tool_choice") == "none" else [openai.tool_of(function) for function in functions if function.get("name")]
    return openai.conversation_of(messages, None, _above, partial(_turns, harness=harness), usable, harness)


def delivered(reply: Message, offered: Container[str] | None = None) -> Message:
    """An answer as it comes back (rule 1); `offered`: the tools that opencode has (rule 3)."""
    others = tuple(block if offered is None else _as_opencode(block, offered) for block in reply.blocks if block["type"] != "text")
    return Message(reply.role, ({"type": "text", "text": reply.text}, *others) if reply.text else others)


def _as_opencode(block: Block, offered: Container[str]) -> Block:
    """A call as opencode writes it down (rule 3)."""
    if block["type"] != "tool_use" or block["name"] in offered:
        return block
    if block["name"].lower() in offered:
        return {**block, "name": block["name"].lower()}
    return _unknown_to_opencode(block["id"], block["name"])


def _unknown_to_opencode(call: str, name: Any) -> Block:
    return {"type": "tool_use", "id": call, "name": INVALID, "input": {"tool": name}}


class ChatAnswer:
    """See Answer. `usage`: the stream ends with a chunk that tells the usage."""

    def __init__(self, model: str, usage: bool = False) -> None:
        self._model = model
        self._with_usage = usage
        self._id = 0
        self._prompt_tokens = 0
        self._tools = 0
        self._said = False
        self._apart = False

    def encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(part for event in events for part in self._event(event))

    def ping(self) -> bytes:
        """A comment: clients skip it."""
        return PING

    def broken(self, message: str, final: bool = False) -> bytes:
        """A reset alone is repeated, or goes on from the text so far; behind an error event qwen-code gives up."""
        return b"data: " + openai.error_body(400, message) + b"\n\n" if final else b""

    def whole(self, events: Iterable[Event]) -> bytes:
        started, pieces, ended = sort_events(events)
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for piece in pieces:
            for delta in self._deltas(piece):
                _add(message, delta)
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": FINISH[ended.stop_reason]}
        usage = _usage(started.prompt_tokens, ended.tokens)
        return orjson.dumps({**self._envelope(started.call, "chat.completion"), "choices": [choice], "usage": usage})

    def _event(self, event: Event) -> list[bytes]:
        if isinstance(event, Started):
            self._id, self._prompt_tokens = event.call, event.prompt_tokens
            return [self._chunk({"role": "assistant", "content": ""})]
        if isinstance(event, Ended):
            last = [self._chunk({}, FINISH[event.stop_reason])]
            if self._with_usage:
                last.append(self._data(choices=[], usage=_usage(self._prompt_tokens, event.tokens)))
            return [*last, DONE]
        return [self._chunk(delta) for delta in self._deltas(event)]

    def _deltas(self, piece: TextPiece | ThinkingPiece | ToolPiece) -> list[dict[str, Any]]:
        if isinstance(piece, TextPiece):
            text = "\n" + piece.text if self._said and self._apart else piece.text
            self._said, self._apart = True, False
            return [{"content": text}]
        self._apart = True
        if isinstance(piece, ThinkingPiece):
            return [{"reasoning_content": piece.text}]
        index, self._tools = self._tools, self._tools + 1
        named = {"index": index, "id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        return [{"tool_calls": [named]}, {"tool_calls": [{"index": index, "function": {"arguments": orjson.dumps(piece.input).decode()}}]}]

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._data(choices=[choice], **({"usage": None} if self._with_usage else {}))

    def _data(self, **fields: Any) -> bytes:
        return b"data: " + orjson.dumps({**self._envelope(self._id, "chat.completion.chunk"), **fields}) + b"\n\n"

    def _envelope(self, call: int, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{call:08x}", "object": kind, "created": 0, "model": self._model}


@cache
def _shape(harness: Harness) -> Shape:
    return Shape(ChatCompletions.path, "messages", partial(_turns, harness=harness), above=_above)


def _above(message: Any) -> bool:
    """Part of the system prompt, when only such stand before it."""
    return not isinstance(message, Message) and message["role"] in openai.SYSTEM_ROLES


def _turns(messages: Sequence[Any], harness: Harness) -> list[Message]:
    """A turn of each message, blank ones too."""
    if not all(isinstance(message, Message) or message.get("role") in ROLES for message in messages):
        raise BadRequest("messages: each one needs a role")
    return [message if isinstance(message, Message) else _turn(message, harness) for message in messages]


def _turn(message: Mapping[str, Any], harness: Harness) -> Message:
    role, content = message["role"], message.get("content")
    texts = openai.texts_of(content, f"a {role} message", told=role == "tool")
    if role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": texts}
        return normalise_message("user", [result])
    if role != "assistant":
        return normalise_message("system" if role in openai.SYSTEM_ROLES else role, openai.text_blocks(texts))
    if message.get("function_call"):
        raise UnsupportedContent("function_call is not supported; use tool_calls")
    thought = message.get("reasoning_content") or message.get("reasoning")
    thinking = [{"type": "thinking", "thinking": thought}] if isinstance(thought, str) else []
    said = openai.text_blocks(["\n".join(texts)]) if texts else []
    calls = [_call(call, harness) for call in openai.objects(message.get("tool_calls"), "tool_calls")]
    return normalise_message(role, [*thinking, *said, *calls])


def _call(call: Mapping[str, Any], harness: Harness) -> Block:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest("tool_calls: only functions are supported")
    arguments = openai.arguments_of(function.get("arguments"))
    if harness is OPENCODE and function.get("name") == INVALID and arguments.keys() == {"tool", "error"}:
        return _unknown_to_opencode(call.get("id") or "", arguments["tool"])
    return {"type": "tool_use", "id": call.get("id") or "", "name": function.get("name") or "", "input": arguments}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, as a client does."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        (part,) = value
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({name: part[name] for name in ("id", "type", "function")})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total, "prompt_tokens_details": {"cached_tokens": 0}}
