"""The dialect, without sockets: what is accepted, what is refused, and the order of the events."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects.anthropic import (
    MessagesAnswer,
    SseEncoder,
    call_request,
    conversation_of,
    error_body,
    error_event,
    message_body,
)
from gyre_hpc.gateway.dialects.dialect import parse_body
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, ToolPiece

EVENTS: list[Event] = [
    Started(7, 11),
    ThinkingPiece("h"),
    ThinkingPiece("m"),
    TextPiece("a"),
    TextPiece("b"),
    ToolPiece("t_0", "bash", {"x": 1}),
    ToolPiece("t_1", "bash", {}),
    TextPiece("c"),
    Ended("tool_use", 5),
]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}


def events(raw: bytes) -> list[dict[str, Any]]:
    parsed = []
    for block in raw.strip().split(b"\n\n"):
        name, data = block.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        parsed.append(event)
    return parsed


def test_the_order_of_events() -> None:
    stream = events(SseEncoder("m").encode(EVENTS))
    assert [e["type"] for e in stream][:2] == ["message_start", "ping"]
    shape = [(e["type"].removeprefix("content_block_"), e["index"]) for e in stream if "index" in e]
    start, delta, stop = "start", "delta", "stop"
    assert shape == [
        (start, 0), (delta, 0), (delta, 0), (stop, 0),
        (start, 1), (delta, 1), (delta, 1), (stop, 1),
        (start, 2), (delta, 2), (stop, 2),
        (start, 3), (delta, 3), (stop, 3),
        (start, 4), (delta, 4), (stop, 4),
    ]  # fmt: skip
    assert [e["type"] for e in stream][-2:] == ["message_delta", "message_stop"]
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (stream[-2]["usage"]["input_tokens"], stream[-2]["usage"]["output_tokens"]) == (11, 5)
    assert stream[0]["message"]["usage"]["input_tokens"] == 11


def test_cutting_the_events_changes_no_byte() -> None:
    whole, encoder = SseEncoder("m").encode(EVENTS), SseEncoder("m")
    assert b"".join(encoder.encode([event]) for event in EVENTS) == whole


def test_an_answer_without_text_has_no_block() -> None:
    stream = events(SseEncoder("m").encode([Started(0, 1), Ended("end_turn", 1)]))
    assert [e["type"] for e in stream] == ["message_start", "ping", "message_delta", "message_stop"]


def test_the_plain_message_has_the_same_blocks() -> None:
    message = orjson.loads(message_body(EVENTS, "m"))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert message["content"][1] == {"type": "text", "text": "ab"}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens"] == 5
    with pytest.raises(ValueError, match="not over"):
        message_body(EVENTS[:-1], "m")


def test_unknown_fields_are_accepted_and_system_may_be_blocks() -> None:
    odd = body(
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "{}"},
        context_management={"edits": []},
        novelty=[1],
        stop_sequences=["</x>"],
        tools=[{"name": "t", "input_schema": {}, "novelty": 1}, {"type": "computer_20250124"}],
        messages=[{"role": "user", "content": "hi", "novelty": 2}, {"role": "system", "content": "note"}, {"role": "user", "content": "x"}],
    )
    conversation = conversation_of(odd)
    assert conversation.head.system == "S"
    assert [tool["name"] for tool in conversation.head.tools] == ["t"]
    assert [message.role for message in conversation.messages] == ["user", "system", "user"]
    assert conversation_of({**odd, "tool_choice": {"type": "none"}}).head.tools == ()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": "hi"}, "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image blocks are not supported"),
        ({"messages": [{"role": "user", "content": 5}]}, "string or a list"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "end with a user message"),
        ({"tools": {"a": 1}}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_refusals(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        call_request(b"", body(**fields), "")


def test_bodies_that_are_not_json_objects() -> None:
    for raw in (b"", b"{", b"[1]", b"\xff"):
        with pytest.raises(BadRequest):
            parse_body(raw)


def test_the_digest_is_that_of_body_and_agent() -> None:
    assert call_request(b"a", body(), "").digest == call_request(b"a", body(), "").digest
    assert len({call_request(raw, body(), agent).digest for raw in (b"a", b"b") for agent in ("", "x")}) == 4


def test_error_bodies() -> None:
    assert orjson.loads(error_body(400, "no")) == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
    assert events(error_event("broke"))[0]["error"]["type"] == "api_error"
    answer = MessagesAnswer("policy")
    assert answer.broken("broke") == b""
    assert events(answer.broken("no", final=True))[0]["error"] == {"type": "invalid_request_error", "message": "no"}
