"""The Chat Completions dialect, without sockets: what is accepted and refused, what is equal, and the order of the chunks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects.canonical import Message, normalise_message
from gyre_hpc.gateway.dialects.chat import ChatAnswer, ChatCompletions, call_request, conversation_of, delivered
from gyre_hpc.gateway.dialects.openai import UNLIMITED
from gyre_hpc.gateway.harnesses import GENERIC, OPENCODE, Harness
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, ToolPiece, blocks_of

EVENTS: list[Event] = [
    Started(7, 11),
    ThinkingPiece("h"),
    ThinkingPiece("m"),
    TextPiece("a"),
    TextPiece("b"),
    ToolPiece("t_0", "bash", {"x": 1}),
    ToolPiece("t_1", "bash", {}),
    TextPiece("c"),
    TextPiece("d"),
    Ended("tool_use", 5),
]
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}, "strict": True}}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}


def assistant(**fields: Any) -> Message:
    turns = conversation_of(body({"role": "user", "content": "hi"}, {"role": "assistant", **fields}, {"role": "user", "content": "x"}))
    return turns.messages[1]


def call(arguments: Any, tool_id: str = "t_0", name: str = "bash", **fields: Any) -> dict[str, Any]:
    return {"id": tool_id, "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def chunks(raw: bytes) -> list[dict[str, Any]]:
    *parts, last = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    return [orjson.loads(part.removeprefix(b"data: ")) for part in parts]


def test_the_order_of_chunks() -> None:
    stream = chunks(ChatAnswer("m", usage=True).encode(EVENTS))
    *told, usage = stream
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in stream} == {("chatcmpl-00000007", "chat.completion.chunk", "m")}
    assert [chunk["choices"][0]["delta"] for chunk in told] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "a"},
        {"content": "b"},
        {"tool_calls": [{"index": 0, "id": "t_0", "type": "function", "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
        {"tool_calls": [{"index": 1, "id": "t_1", "type": "function", "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {"content": "\nc"},
        {"content": "d"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None] * 11 + ["tool_calls"]
    assert all(chunk["usage"] is None for chunk in told)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_usage_is_told_when_it_is_asked_for() -> None:
    assert all("usage" not in chunk for chunk in chunks(ChatAnswer("m").encode(EVENTS)))
    for options, told in (({"include_usage": True}, True), ({}, False), (None, False), ("x", False)):
        asked = ChatCompletions().ask(orjson.dumps(body(stream=True, stream_options=options)), {}, "policy")
        assert (b'"usage"' in asked.answer.encode(EVENTS)) is told


def test_cutting_the_events_changes_no_byte() -> None:
    whole, answer = ChatAnswer("m", usage=True).encode(EVENTS), ChatAnswer("m", usage=True)
    assert b"".join(answer.encode([event]) for event in EVENTS) == whole


def test_the_plain_message_is_what_the_stream_adds_up_to() -> None:
    whole = orjson.loads(ChatAnswer("m").whole(EVENTS))
    (choice,) = whole["choices"]
    assert (whole["id"], whole["object"], choice["finish_reason"]) == ("chatcmpl-00000007", "chat.completion", "tool_calls")
    assert choice["message"] == {
        "role": "assistant",
        "content": "ab\ncd",
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [call('{"x":1}'), call("{}", "t_1")],
    }
    assert whole["usage"]["total_tokens"] == 16
    with pytest.raises(ValueError, match="not over"):
        ChatAnswer("m").whole(EVENTS[:-1])


def test_finish_reasons_and_answers_without_text() -> None:
    for reason, finish in (("end_turn", "stop"), ("max_tokens", "length")):
        (choice,) = orjson.loads(ChatAnswer("m").whole([Started(0, 1), Ended(reason, 1)]))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == (finish, "")
    only_a_call: list[Event] = [Started(0, 1), ToolPiece("t_0", "bash", {}), Ended("tool_use", 1)]
    assert orjson.loads(ChatAnswer("m").whole(only_a_call))["choices"][0]["message"]["content"] is None


def test_rule_1_what_is_delivered_is_what_comes_back() -> None:
    pieces = [event for event in EVENTS if not isinstance(event, Started | Ended)]
    sent = delivered(normalise_message("assistant", list(blocks_of(pieces))))
    message = orjson.loads(ChatAnswer("m").whole(EVENTS))["choices"][0]["message"]
    assert assistant(**message).key == sent.key
    assert assistant(content=message["content"], tool_calls=[call('{ "x": 1.0 }'), call("", "t_1")]).key == sent.key
    assert assistant(content=[{"type": "text", "text": "ab\ncd"}], tool_calls=message["tool_calls"]).key == sent.key
    assert assistant(content="ab", tool_calls=message["tool_calls"]).key != sent.key


def test_rule_1_an_answer_without_text_has_no_text() -> None:
    sent = delivered(normalise_message("assistant", [{"type": "tool_use", "id": "t_0", "name": "bash", "input": {}}]))
    for content in (None, "", " ", []):
        assert assistant(content=content, tool_calls=[call("{}")]).key == sent.key
    assert assistant(tool_calls=[call("{}")]).key == sent.key
    assert delivered(Message("assistant", ())).blank


def test_rule_2_results_are_turns_and_thoughts_are_not_compared() -> None:
    results = [{"role": "tool", "tool_call_id": f"t_{i}", "content": content} for i, content in enumerate(("a", [{"text": "b"}], ""))]
    turns = conversation_of(body({"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call("{}")]}, *results)).messages
    assert [(turn.role, turn.blocks[0]["tool_use_id"], turn.blocks[0]["content"]) for turn in turns[2:]] == [
        ("user", "t_0", ["a"]),
        ("user", "t_1", ["b"]),
        ("user", "t_2", []),
    ]
    for name in ("reasoning_content", "reasoning"):
        thinking = assistant(content="x", **{name: "hm"})
        assert thinking.key == assistant(content="x").key
        assert thinking.blocks[0] == {"type": "thinking", "thinking": "hm"}
    assert assistant(content="x", reasoning=None, reasoning_content=["odd"]).key == assistant(content="x").key


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"tool_calls": [call('{"a":1,"b":2}')]}, {"tool_calls": [call('{"b": 2.0, "a": 1}')]}, True),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}", index=0, extra_content=None)], "refusal": None, "audio": None}, True),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}", "t_1")]}, False),
        ({"tool_calls": [call("{}"), call("{}", "t_1")]}, {"tool_calls": [call("{}", "t_1"), call("{}")]}, False),
        ({"content": "x", "tool_calls": None}, {"content": "x", "tool_calls": []}, True),
        ({"content": "x", "function_call": None, "annotations": []}, {"content": "x"}, True),
        ({"content": "x"}, {"content": "y"}, False),
    ],
)
def test_equal_turns(one: dict[str, Any], other: dict[str, Any], equal: bool) -> None:
    assert (assistant(**one).key == assistant(**other).key) is equal


def test_a_turn_that_says_nothing_is_no_turn() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}, {"role": "user", "content": "x"}]
    assert [turn.role for turn in conversation_of(body(*messages)).messages] == ["user", "user"]


def test_system_and_developer_stand_above_or_in_between() -> None:
    conversation = conversation_of(
        body(
            {"role": "system", "content": "S"},
            {"role": "developer", "content": [{"type": "text", "text": "D"}]},
            {"role": "user", "content": "hi", "name": "u"},
            {"role": "developer", "content": "note"},
            tools=[BASH, {"type": "custom", "custom": {"name": "odd"}}, {"type": "function", "function": {}}],
            novelty=1,
            response_format={"type": "json_object"},
        )
    )
    assert conversation.head.system == "S\n\nD"
    assert conversation.head.tools == ({"name": "bash", "description": "", "input_schema": {"type": "object"}},)
    assert [(turn.role, turn.text) for turn in conversation.messages] == [("user", "hi"), ("system", "note")]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "bash"}}, None):
        assert len(conversation_of(body(tools=[BASH], tool_choice=choice)).head.tools) == 1
    assert conversation_of(body(tools=[BASH], tool_choice="none")).head.tools == ()


def test_limits_of_tokens() -> None:
    assert call_request(b"", body(), "").max_tokens == UNLIMITED
    assert call_request(b"", body(max_tokens=5), "").max_tokens == 5
    assert call_request(b"", body(max_tokens=5, max_completion_tokens=6), "").max_tokens == 6


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": None}, "at least one"),
        ({"messages": "hi"}, "messages: a list of objects"),
        ({"messages": [{"role": "function", "content": "x"}]}, "role"),
        ({"messages": [{"role": []}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url parts .* text only"),
        ({"messages": [{"role": "user", "content": 5}]}, "string or a list"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "use tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "tool_calls: a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "only functions"),
        ({"tools": {"a": 1}}, "tools"),
        ({"functions": [{"name": "x"}]}, "use tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n: only 1"),
        ({"stop": ["\n"]}, "stop: "),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_refusals(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        call_request(b"", {**body(), **fields}, "")


def test_defaults_that_clients_spell_out_are_accepted() -> None:
    call_request(b"", body(n=1, stop=None, logprobs=False, functions=None, temperature=0.2, top_p=0.9, seed=1, store=False, user="u"), "")


def test_what_keeps_alive_and_what_breaks() -> None:
    answer = ChatAnswer("m")
    assert answer.ping().startswith(b":")
    assert orjson.loads(answer.broken("gone", final=True).removeprefix(b"data: "))["error"]["message"] == "gone"


def test_rule_3_opencode_renames_calls_that_it_can_not_run() -> None:
    tools = [{"type": "function", "function": {"name": "bash"}}]
    asked = call_request(b"", body({"role": "user", "content": "x"}, tools=tools), "", OPENCODE)
    said = normalise_message(
        "assistant",
        [{"type": "tool_use", "id": f"t_{i}", "name": name, "input": {"x": 1.0}} for i, name in enumerate(("nope", "Bash", "bash"))],
    )
    error = {"tool": "nope", "error": "Model tried to call unavailable tool 'nope'."}
    echoed = [call(error, name="invalid"), call({"x": 1}, "t_1"), call({"x": 1}, "t_2")]

    def back(calls: list[dict[str, Any]], harness: Harness) -> Message:
        return conversation_of(
            body({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}), harness
        ).messages[1]

    assert asked.delivered(said).key == back(echoed, OPENCODE).key
    assert asked.delivered(said).key != back(echoed, GENERIC).key
    assert asked.delivered(said).key != back([call({**error, "tool": "other"}, name="invalid"), *echoed[1:]], OPENCODE).key
    plain = call_request(b"", body({"role": "user", "content": "x"}, tools=tools), "")
    assert plain.delivered(said).key == said.key
