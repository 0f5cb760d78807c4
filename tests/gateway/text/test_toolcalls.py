"""Hermes parsing: what is a call, what stays text, and that cutting the stream anywhere changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.canonical import Block
from gyre_hpc.gateway.text.toolcalls import DEEPEST, ToolCallParser, blocks_of, parse_call
from tests.gateway.fakes import tool_call


def parse(text: str, cuts: tuple[int, ...] = (), thinking: bool = False) -> tuple[Block, ...]:
    parser = ToolCallParser("t", thinking)
    pieces = []
    at = 0
    for cut in (*sorted(cuts), len(text)):
        pieces += parser.feed(text[at:cut])
        at = max(at, cut)
    return blocks_of([*pieces, *parser.finish()])


def text(value: str) -> Block:
    return {"type": "text", "text": value}


def test_text_and_calls() -> None:
    both = parse("I look.\n" + tool_call("bash", command="ls") + "\n" + tool_call("write_file", path="a", content="b"))
    assert both == (
        text("I look."),
        {"type": "tool_use", "id": "t_0", "name": "bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "t_1", "name": "write_file", "input": {"path": "a", "content": "b"}},
    )


@pytest.mark.parametrize(
    "raw",
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": "bash"}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "bash", "arguments": {"n": NaN}}</tool_call>',
        "<tool_call>[1]</tool_call> and more",
        '<tool_call>{"name": "bash", "arguments": {}}',
        "</tool_call> alone",
        "a < b <tool",
    ],
)
def test_what_is_not_a_call_is_delivered_as_the_text_it_is(raw: str) -> None:
    assert parse(raw) == (text(raw),)


def test_a_broken_call_before_a_good_one() -> None:
    good = tool_call("bash", command="ls")
    assert parse("<tool_call>{oops</tool_call>" + good)[0] == text("<tool_call>{oops</tool_call>")
    assert parse("<tool_call>{oops</tool_call>" + good)[1]["id"] == "t_0"


def test_thoughts() -> None:
    assert parse("<think>\nhm\n</think>\n\nyes") == ({"type": "thinking", "thinking": "\nhm\n"}, text("\n\nyes"))
    assert parse("hm</think>yes", thinking=True) == ({"type": "thinking", "thinking": "hm"}, text("yes"))
    assert parse("<think>cut") == ({"type": "thinking", "thinking": "cut"},)
    assert parse("no <think>thought</think>") == (text("no <think>thought</think>"),)


def test_blank_text_is_not_delivered() -> None:
    assert parse(" \n ") == ()
    assert parse("") == ()
    assert [block["type"] for block in parse("\n" + tool_call("a") + "\n\n" + tool_call("b") + "\n")] == ["tool_use", "tool_use"]


def test_parse_call_is_strict() -> None:
    assert parse_call(' {"name": "a", "arguments": {"x": 1}, "more": 2} ') == ("a", {"x": 1})
    assert parse_call('{"name": 1, "arguments": {}}') is None
    for levels, read in ((DEEPEST, True), (DEEPEST + 1, False), (300, False)):
        arguments = '{"b":' * levels + "1" + "}" * levels
        assert (parse_call('{"name": "a", "arguments": ' + arguments + "}") is not None) is read


fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "_call>", '{"name": "x", "arguments": {}}', " ", "\n", "a", "<", "é"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(fragments, max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_cutting_the_stream_changes_nothing(raw: str, cuts: list[int], thinking: bool) -> None:
    whole = parse(raw, thinking=thinking)
    assert parse(raw, tuple(min(cut, len(raw)) for cut in cuts), thinking) == whole
    assert parse(raw, tuple(range(len(raw))), thinking) == whole
    if not thinking and "<think>" not in raw and not any(block["type"] == "tool_use" for block in whole):
        assert "".join(block["text"] for block in whole) == raw.rstrip()
