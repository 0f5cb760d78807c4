"""Each rule of the canonical form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.canonical import (
    Head,
    Message,
    UnsupportedContent,
    canonical_value,
    normalise_message,
    normalise_messages,
    normalise_system,
    normalise_tools,
)


def user(content: Any) -> Message:
    return normalise_message("user", content)


def assistant(*blocks: dict[str, Any]) -> Message:
    return normalise_message("assistant", list(blocks))


def call(arguments: object, id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "bash", "input": arguments}


def text(value: str, **more: object) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_string_content_is_one_text_block_and_cache_control_means_nothing() -> None:
    assert user("hello").key == user([text("hello", cache_control={"type": "ephemeral"}, citations=None)]).key
    assert user("hello").key != user("hello ").key
    assert user("hello").key != normalise_message("system", "hello").key


def test_blank_blocks_and_empty_messages_are_dropped() -> None:
    assert assistant(text("  \n"), call({})).key == assistant(call({})).key
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [text("")]}, {"role": "user", "content": None}]
    assert [m.role for m in normalise_messages(messages)] == ["user"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"n": 1000.0}, {"n": 1000}),
        ({"n": -0.0}, {"n": 0}),
        ({"n": 12345678901234567890}, {"n": 12345678901234567000}),
        ({"n": [1e2, {"x": 3.0}]}, {"n": [100, {"x": 3}]}),
    ],
)
def test_arguments_are_compared_as_json_values(one: object, other: object) -> None:
    assert assistant(call(one)).key == assistant(call(other)).key


@pytest.mark.parametrize(("one", "other"), [({"n": 1}, {"n": "1s"}), ({"n": 1}, {"n": True}), ({"n": 1}, {"n": 1.5}), ({}, {"n": 0})])
def test_other_arguments_differ(one: object, other: object) -> None:
    assert assistant(call(one)).key != assistant(call(other)).key


def test_tool_ids_are_kept() -> None:
    assert assistant(call({}, "t1")).key != assistant(call({}, "t2")).key
    assert user([{"type": "tool_result", "tool_use_id": "t1"}]).key != user([{"type": "tool_result", "tool_use_id": "t2"}]).key


def test_tool_results_as_string_or_blocks_and_is_error() -> None:
    def result(**fields: Any) -> Message:
        return user([{"type": "tool_result", "tool_use_id": "t1", **fields}])

    assert result(content="out").key == result(content=[text("out", cache_control={})], is_error=False).key
    assert result(content="out").key != result(content="out", is_error=True).key
    assert result().key == result(content=[]).key == result(content="").key


def test_text_stands_before_tool_calls_in_an_assistant_turn_only() -> None:
    assert assistant(call({}), text("after")).key == assistant(text("after"), call({})).key
    assert assistant(text("a"), text("b")).key != assistant(text("b"), text("a")).key
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
    assert user([result, text("a")]).key != user([text("a"), result]).key


def test_thinking_is_not_compared_but_kept_for_rendering() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert assistant(thought, text("a")).key == assistant(text("a")).key
    assert assistant(thought, text("a")).blocks[0] == {"type": "thinking", "thinking": "hm"}
    assert assistant(thought).blank


def test_attribution_is_no_part_of_the_system_prompt() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2; cch=1234;"), text("You code.", cache_control={"type": "ephemeral"})]
    assert normalise_system(blocks) == normalise_system("You code.") == "You code."
    assert normalise_system(None) == ""


def test_what_stands_below_an_attribution_line_stays() -> None:
    line = "x-anthropic-billing-header: cch=%d;\n"
    assert normalise_system(line % 1 + "You code.") == normalise_system(line % 2 + "You code.") == "You code."
    assert user(line % 1 + "Fix it.").key == user("Fix it.").key != user(line % 1 + "Break it.").key
    assert user(line % 1).blank


@pytest.mark.parametrize("content", [5, True, {"type": "text", "text": "a"}])
def test_a_result_that_is_neither_text_nor_blocks_is_refused(content: object) -> None:
    with pytest.raises(UnsupportedContent, match="tool_result must be"):
        user([{"type": "tool_result", "tool_use_id": "i", "content": content}])


def test_head_compares_tools_by_value() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1.0}}}
    one = normalise_tools([{"name": "t", "description": "d", "input_schema": schema, "cache_control": {}}])
    other = normalise_tools(
        [{"input_schema": {**schema, "properties": {"a": {"minimum": 1, "type": "integer"}}}, "description": "d", "name": "t"}]
    )
    assert Head("s", one).key == Head("s", other).key
    assert Head("s", one).key != Head("", one).key
    assert Head("s", one).key != Head("s", normalise_tools([{"name": "t"}])).key


@pytest.mark.parametrize("block", [{"type": "image", "source": {}}, {"type": "document"}, {"type": "novelty"}, 7])
def test_what_a_text_model_cannot_read_is_refused(block: object) -> None:
    with pytest.raises(UnsupportedContent):
        user([block])


def test_what_a_tool_shows_of_an_image_is_told_as_left_out() -> None:
    shown = user([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]}])
    assert shown.blocks[0]["content"] == ["a", "[image left out: this model reads text only]"]
    with pytest.raises(UnsupportedContent):
        user([{"type": "tool_result", "tool_use_id": "t", "content": [7]}])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(json_values)
def test_canonical_value_survives_any_reserialisation(value: object) -> None:
    once = canonical_value(value)
    assert canonical_value(once) == once
    assert canonical_value(json.loads(json.dumps(value, sort_keys=True, indent=1))) == once


CALL = {"file_path": "/w/a.py", "old_string": "x", "new_string": "y", "timeout": 5000}


@pytest.mark.parametrize(
    "came",
    [
        {**CALL, "replace_all": False},
        {**CALL, "replace_all": "false", "nothing": None},
        {**CALL, "timeout": "5000"},
        {**CALL, "timeout": "5e3"},
        {**CALL, "new_string": "y \t\u2028\ufeff"},
        {**CALL, "old_string": "x\r"},
    ],
)
def test_what_a_harness_makes_of_arguments_means_nothing(came: dict[str, Any]) -> None:
    """Rule 3, as Claude Code does it: defaults are added, numbers and truths are read out of text, blanks at ends of lines go."""
    turns = [normalise_message("assistant", [{"type": "tool_use", "id": "t1", "name": "Edit", "input": i}]) for i in (CALL, came)]
    assert turns[0].key == turns[1].key
    assert turns[1].blocks[0]["input"] == came, "what is rendered stays as it came"


@pytest.mark.parametrize(
    "came",
    [
        {**CALL, "replace_all": True},
        {**CALL, "timeout": 5001},
        {**CALL, "new_string": " y"},
        {**CALL, "new_string": "y\n"},
        {**CALL, "new_string": "y\n\ny"},
        {**CALL, "timeout": "5000ms"},
    ],
)
def test_what_means_something_stays(came: dict[str, Any]) -> None:
    turns = [normalise_message("assistant", [{"type": "tool_use", "id": "t1", "name": "Edit", "input": i}]) for i in (CALL, came)]
    assert turns[0].key != turns[1].key
