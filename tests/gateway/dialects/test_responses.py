"""Requests of the Responses dialect, without sockets: what is accepted, what is refused, what is equal."""

from __future__ import annotations

from typing import Any

import pytest

from gyre_hpc.gateway.calls import BadRequest
from gyre_hpc.gateway.dialects.canonical import Conversation, Message, normalise_message
from gyre_hpc.gateway.dialects.openai import UNLIMITED
from gyre_hpc.gateway.dialects.responses import call_request, conversation_of, tools_of

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
FUNCTION = {"type": "function", "name": "bash", "description": "run", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "a patch", "format": {"type": "grammar", "definition": "start: x"}}
SPACE = {"type": "namespace", "name": "crm", "tools": [{**FUNCTION, "name": "find"}, PATCH]}


def body(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items) or "hi", **fields}


def turns(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return conversation_of(body(USER, *items, USER, **fields)).messages[1:-1]


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}], **fields}


def call(arguments: Any = "{}", call_id: str = "c_0", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": arguments, **fields}


def output(value: Any, call_id: str = "c_0", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def blocks(*items: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(turn.role, [block["type"] for block in turn.blocks]) for turn in turns(*items)]


def test_rule_1_items_of_the_assistant_are_one_turn() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": "x"}
    found = blocks(
        thought, said("a"), call(), call(call_id="c_1"), said("b"), output("x"), output([{"type": "input_text", "text": "y"}], "c_1")
    )
    assert found == [
        ("assistant", ["thinking", "text", "tool_use", "tool_use", "text"]),
        ("user", ["tool_result"]),
        ("user", ["tool_result"]),
    ]
    assert blocks(said("a"), USER, said("b")) == [("assistant", ["text"]), ("user", ["text"]), ("assistant", ["text"])]
    assert blocks(said(""), said(" ")) == []


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([said("a", id="msg_1", status="completed", phase="x")], [{"role": "assistant", "content": "a"}], True),
        ([call(id="fc_1", status="completed")], [call()], True),
        ([call(call_id="c_1")], [call()], False),
        ([call('{"a":1,"b":2}')], [call('{"b": 2.0, "a": 1}')], True),
        ([call("")], [call("{}")], True),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, said("a")], [said("a")], True),
        ([{"type": "reasoning", "summary": []}, said("a")], [said("a")], True),
        ([said("a"), call()], [call(), said("a")], True),  # the order of texts and calls: rule 5 of canonical.py
        ([call(), call(call_id="c_1")], [call(call_id="c_1"), call()], False),
        ([said("a"), said("b")], [said("a\nb")], False),
        ([{"type": "web_search_call", "id": "ws"}, said("a")], [said("a")], True),
    ],
)
def test_rule_2_equal_turns(one: list[dict[str, Any]], other: list[dict[str, Any]], equal: bool) -> None:
    assert ([turn.key for turn in turns(*one)] == [turn.key for turn in turns(*other)]) is equal


def test_reasoning_is_a_thought() -> None:
    (turn,) = turns({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, said("a"))
    assert turn.blocks[0] == {"type": "thinking", "thinking": "s"}


def test_rule_3_functions_in_a_namespace() -> None:
    definitions, tools = tools_of(body(tools=[FUNCTION, SPACE]))
    assert [tool["name"] for tool in definitions] == ["bash", "crm.find", "crm.patch"]
    assert tools.spaces == {"crm.find": ("crm", "find"), "crm.patch": ("crm", "patch")}
    (turn,) = turns(call(name="find", namespace="crm"))
    assert turn.blocks[0]["name"] == "crm.find"


def test_rule_4_custom_tools_take_a_text() -> None:
    asked = body(tools=[PATCH])
    (tool,) = conversation_of(asked).head.tools
    assert tool["description"] == "a patch\nstart: x"
    assert list(tool["input_schema"]["properties"]) == ["input"]
    request = call_request(b"", asked, "")
    for arguments, text in (({"input": "x"}, "x"), ({"a": 1}, '{"a":1}'), ({"input": 5}, '{"input":5}'), ({}, "{}")):
        sent = request.delivered(normalise_message("assistant", [{"type": "tool_use", "id": "c_0", "name": "patch", "input": arguments}]))
        back = {"type": "custom_tool_call", "call_id": "c_0", "name": "patch", "input": text}
        (turn,) = turns(back, output("done", kind="custom_tool_call_output"))[:1]
        assert turn.key == sent.key
    plain = normalise_message("assistant", [{"type": "tool_use", "id": "c_0", "name": "bash", "input": {"a": 1}}])
    assert request.delivered(plain) == plain


def test_rule_5_what_only_openai_runs_is_left_out() -> None:
    hosted = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "function"}, {"type": "novelty", "name": "x"}]
    assert conversation_of(body(tools=hosted)).head.tools == ()


def test_instructions_and_developer_messages_are_the_system_prompt() -> None:
    def developer(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}

    conversation: Conversation = conversation_of(
        body(developer("D"), {"role": "system", "content": "E"}, USER, developer("note"), instructions="S", tools=[FUNCTION])
    )
    assert conversation.head.system == "S\n\nD\n\nE"
    assert conversation.head.tools == ({"name": "bash", "description": "run", "input_schema": {"type": "object"}},)
    assert [(turn.role, turn.text) for turn in conversation.messages] == [("user", "hi"), ("system", "note")]
    assert conversation_of(body(tools=[FUNCTION], tool_choice="none")).head.tools == ()
    for choice in ("auto", "required", {"type": "function", "name": "bash"}):
        assert len(conversation_of(body(tools=[FUNCTION], tool_choice=choice)).head.tools) == 1


def test_a_text_is_one_user_message() -> None:
    assert conversation_of(body()).key == conversation_of(body(USER)).key == conversation_of(body({"role": "user", "content": "hi"})).key


def test_unknown_fields_and_limits() -> None:
    odd = body(store=True, include=["reasoning.encrypted_content"], text={"format": {"type": "text"}}, novelty=1, previous_response_id=None)
    assert call_request(b"", odd, "").max_tokens == UNLIMITED
    assert call_request(b"", body(max_output_tokens=5), "").max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input": []}, "at least one item"),
        ({"input": None}, "at least one item"),
        ({"input": {}}, "input: a list"),
        ({"input": ["x"]}, "input: a list of objects"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role"),
        ({"input": [{"type": "message", "role": []}]}, "role"),
        ({"input": [{"type": "novelty"}]}, "novelty items are not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the whole conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image parts .* text only"),
        ({"input": [output([7])]}, "int parts in the output of a call"),
        ({"input": [{"role": "user", "content": 5}]}, "string or a list"),
        ({"instructions": 5}, "string or a list"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools of n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "r"}, "send the whole conversation"),
        ({"conversation": {"id": "c"}}, "send the whole conversation"),
        ({"background": True}, "stream the answer"),
        ({"prompt": {"id": "p"}}, "instructions"),
    ],
)
def test_refusals(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        call_request(b"", {**body(), **fields}, "")


def test_an_image_that_a_tool_shows_is_told_as_left_out() -> None:
    """Codex's view_image: a refusal would end it."""
    (shown,) = turns(output([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:"}]))
    assert shown.blocks[0]["content"] == ["a", "[input_image left out: this model reads text only]"]
