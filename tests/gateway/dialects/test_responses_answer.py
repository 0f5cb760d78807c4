"""Answers of the Responses dialect, without sockets: the order of the events, and that stream and plain response agree."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gyre_hpc.gateway.calls import Ended, Event, Started
from gyre_hpc.gateway.dialects.responses_answer import ResponsesAnswer, Tools
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, ToolPiece

EVENTS: list[Event] = [
    Started(7, 11),
    ThinkingPiece("h"),
    ThinkingPiece("m"),
    TextPiece("a"),
    TextPiece("b"),
    ToolPiece("t_0", "crm.find", {"x": 1}),
    ToolPiece("t_1", "patch", {"input": "p"}),
    TextPiece("c"),
    Ended("tool_use", 5),
]


def answer() -> ResponsesAnswer:
    return ResponsesAnswer("m", Tools({"crm.find": ("crm", "find")}, {"patch"}))


def events(raw: bytes) -> list[dict[str, Any]]:
    parsed = []
    for block in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = block.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        parsed.append(event)
    return parsed


def test_the_order_of_events() -> None:
    stream = events(answer().encode(EVENTS))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    shape = [(event["type"].removeprefix("response."), event.get("output_index")) for event in stream]
    assert shape == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1), ("output_text.delta", 1),
        ("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.done", 2), ("output_item.done", 2),
        ("output_item.added", 3), ("custom_tool_call_input.delta", 3), ("custom_tool_call_input.done", 3), ("output_item.done", 3),
        ("output_item.added", 4), ("content_part.added", 4), ("output_text.delta", 4),
        ("output_text.done", 4), ("content_part.done", 4), ("output_item.done", 4),
        ("completed", None),
    ]  # fmt: skip


def test_items_begin_empty_and_end_whole() -> None:
    stream = events(answer().encode(EVENTS))
    added = [event["item"] for event in stream if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert len({item["id"] for item in done}) == 5
    assert {item["status"] for item in added} == {"in_progress"}
    assert [item.get("content", item.get("arguments", item.get("input"))) for item in added] == [[], [], "", "", []]
    thought, text, find, patch, _ = done
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"] == [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}]
    assert (find["call_id"], find["namespace"], find["name"], find["arguments"]) == ("t_0", "crm", "find", '{"x":1}')
    assert (patch["type"], patch["call_id"], patch["name"], patch["input"]) == ("custom_tool_call", "t_1", "patch", "p")
    assert stream[-1]["response"]["output"] == done
    assert stream[0]["response"]["output"] == []
    deltas = {event["item_id"] for event in stream if event["type"].endswith(".delta")}
    assert deltas == {item["id"] for item in done}


def test_cutting_the_events_changes_no_byte() -> None:
    whole, cut = answer().encode(EVENTS), answer()
    assert b"".join(cut.encode([event]) for event in EVENTS) == whole


def test_the_plain_response_is_that_of_the_last_event() -> None:
    whole = orjson.loads(answer().whole(EVENTS))
    assert whole == events(answer().encode(EVENTS))[-1]["response"]
    assert (whole["id"], whole["status"], whole["error"], whole["incomplete_details"]) == ("resp_00000007", "completed", None, None)
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (11, 5, 16)
    with pytest.raises(ValueError, match="not over"):
        answer().whole(EVENTS[:-1])


def test_an_answer_that_was_cut_is_incomplete() -> None:
    last = events(answer().encode([Started(0, 1), TextPiece("a"), Ended("max_tokens", 1)]))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_an_answer_without_text_has_no_item() -> None:
    assert orjson.loads(answer().whole([Started(0, 1), Ended("end_turn", 1)]))["output"] == []


def test_pings_are_comments_first_and_take_no_number() -> None:
    pinged = answer()
    assert pinged.ping().startswith(b":")
    raw = pinged.encode(EVENTS[:3])
    (ping,) = events(pinged.ping())
    assert ping["type"] == "response.in_progress"
    assert ping["sequence_number"] == events(raw)[-1]["sequence_number"]
    assert raw + pinged.encode(EVENTS[3:]) == answer().encode(EVENTS)


def test_what_tells_that_it_broke() -> None:
    broken = answer()
    broken.encode(EVENTS[:2])
    (event,) = events(broken.broken("gone"))
    assert (event["type"], event["message"]) == ("error", "gone")
