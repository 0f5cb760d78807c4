"""What holds for every dialect of OpenAI, whatever a client sends: it is understood or refused, and a stream is what its events say."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.app import DIALECTS
from gyre_hpc.gateway.calls import BadRequest, Ended, Event, Started
from gyre_hpc.gateway.dialects.bodies import Memory
from gyre_hpc.gateway.dialects.canonical import normalise_message
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.dialects.dialect import Dialect, parse_body, sort_events
from gyre_hpc.gateway.dialects.responses import Responses
from gyre_hpc.gateway.text.toolcalls import TextPiece, ThinkingPiece, ToolPiece, blocks_of

OPENAI: list[Dialect] = [ChatCompletions(), Responses()]
_KEYS = """
    role content type text messages input tools tool_calls function arguments name id call_id tool_call_id output namespace parameters
    instructions stream stream_options tool_choice max_tokens max_output_tokens n reasoning_content summary format model
"""
NAMES = st.sampled_from(_KEYS.split())
_VALUES = """
    system developer user assistant tool message function_call function_call_output custom_tool_call reasoning function custom namespace
    text input_text output_text refusal none auto {} [1] x
"""
WORDS = st.sampled_from(_VALUES.split())
LEAVES = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text(max_size=3)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8)
ITEMS = st.lists(st.fixed_dictionaries({}, optional={"role": WORDS, "type": WORDS, "content": VALUES, "tool_calls": VALUES}), max_size=4)
BODIES = st.fixed_dictionaries({}, optional={"messages": ITEMS | VALUES, "input": ITEMS | VALUES, "tools": ITEMS | VALUES, "model": VALUES})
PIECES = st.lists(
    st.builds(TextPiece, st.text(min_size=1, max_size=3))
    | st.builds(ThinkingPiece, st.text(min_size=1, max_size=3))
    | st.builds(
        ToolPiece, st.text(max_size=3), st.text(min_size=1, max_size=3), st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2)
    ),
    max_size=6,
)

SEEN = st.text("ab\n \u00e9", min_size=1, max_size=4).map(lambda text: text + "z")
VISIBLE = st.lists(
    st.builds(TextPiece, SEEN)
    | st.builds(ThinkingPiece, SEEN)
    | st.builds(ToolPiece, SEEN, SEEN, st.dictionaries(SEEN, LEAVES | st.lists(LEAVES, max_size=2), max_size=2)),
    max_size=6,
)
"""Pieces as the parser makes them: texts end with something visible."""


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
@pytest.mark.parametrize("levels", [260, 500, 900])
def test_what_is_nested_too_deeply_is_refused(dialect: Dialect, levels: int) -> None:
    """By the dialect: later it would be an error of ours, after which clients try again for minutes."""
    value = '{"a":' * levels + "1" + "}" * levels
    function = f'{{"name":"t","input_schema":{value},"parameters":{value}}}'
    turns = '"messages":[{"role":"user","content":"a"}],"input":"a"'
    bodies = [f'{{"max_tokens":9,{turns},"tools":[{{"type":"function","name":"t","function":{function},{function[1:]}]}}']
    arguments = orjson.dumps(value).decode()
    items = {
        "/v1/messages": f'{{"role":"assistant","content":[{{"type":"tool_use","id":"i","name":"t","input":{value}}}]}}',
        "/v1/chat/completions": f'{{"role":"assistant","tool_calls":[{{"id":"i","function":{{"name":"t","arguments":{arguments}}}}}]}}',
        "/v1/responses": f'{{"type":"function_call","call_id":"i","name":"t","arguments":{arguments}}}',
    }
    more = f'[{items[dialect.path]},{{"role":"user","content":"a"}}]'
    bodies.append(f'{{"max_tokens":9,"messages":{more},"input":{more}}}')
    for body in bodies:
        with pytest.raises(BadRequest, match="nested too deeply"):
            dialect.ask(body.encode(), {}, "m", Memory())


@pytest.mark.parametrize("dialect", OPENAI, ids=lambda dialect: dialect.path)
@settings(max_examples=150, deadline=None)
@given(body=BODIES | VALUES)
def test_any_json_is_understood_or_refused(dialect: Dialect, body: Any) -> None:
    try:
        asked = dialect.ask(orjson.dumps(body), {}, "policy")
    except BadRequest:
        return
    conversation = asked.call.conversation
    assert len(conversation.key) == 16
    assert not any(turn.blank for turn in conversation.messages)
    assert dialect.ask(orjson.dumps(body), {}, "policy").call.digest == asked.call.digest


@pytest.mark.parametrize("dialect", OPENAI, ids=lambda dialect: dialect.path)
@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, cut=st.integers(0, 8))
def test_streams_do_not_depend_on_how_events_are_cut(dialect: Dialect, pieces: list[Any], cut: int) -> None:
    raw = orjson.dumps({"messages": [{"role": "user", "content": "x"}], "input": "x"})
    events: list[Event] = [Started(1, 2), *pieces, Ended("end_turn", 3)]
    one, two, plain = (dialect.ask(raw, {}, "policy").answer for _ in range(3))
    assert one.encode(events) == two.encode(events[:cut]) + two.encode(events[cut:])
    assert isinstance(orjson.loads(plain.whole(events)), dict)


def echo(dialect: Dialect, events: list[Event]) -> Any:
    """The body in which a client sends an answer back, and goes on."""
    raw = orjson.dumps({"messages": [{"role": "user", "content": "x"}], "input": "x"})
    whole = orjson.loads(dialect.ask(raw, {}, "policy").answer.whole(events))
    turns = [choice["message"] for choice in whole["choices"]] if "choices" in whole else whole["output"]
    return {name: [{"role": "user", "content": "x"}, *turns, {"role": "user", "content": "y"}] for name in ("messages", "input")}


@pytest.mark.parametrize("dialect", OPENAI, ids=lambda dialect: dialect.path)
@settings(max_examples=100, deadline=None)
@given(pieces=VISIBLE)
def test_what_was_delivered_comes_back_as_the_same_turn(dialect: Dialect, pieces: list[Any]) -> None:
    call = dialect.ask(orjson.dumps(echo(dialect, [Started(1, 2), *pieces, Ended("end_turn", 3)])), {}, "policy").call
    sent = call.delivered(normalise_message("assistant", list(blocks_of(pieces))))
    _, *back, _ = call.conversation.messages
    assert [turn.canonical for turn in back] == ([] if sent.blank else [sent.canonical])


def test_every_dialect_has_its_own_path_and_error_form() -> None:
    assert [dialect.path for dialect in DIALECTS] == ["/v1/messages", "/v1/chat/completions", "/v1/responses"]
    for dialect in DIALECTS:
        assert orjson.loads(dialect.error_body(400, "no"))["error"]["message"] == "no"


def test_bodies_that_are_not_json_objects() -> None:
    assert parse_body(b"{}") == {}
    for raw in (b"", b"{", b"[1]", b"\xff"):
        with pytest.raises(BadRequest):
            parse_body(raw)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_half_a_character_does_not_end_a_task(dialect: Dialect) -> None:
    """JavaScript cuts a text wherever it likes, and escapes the half that is left: Node's JSON.stringify("\\u{1f600}".slice(0, 1))."""
    for half, read in (
        (rb"\ud83d", "\ufffd"),
        (rb"\uDE00", "\ufffd"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\n", "\ufffd\n"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
    ):
        said = b'[{"role":"user","content":"a%bz"}]' % half
        raw = b'{"model":"m","max_tokens":9,"messages":%b,"input":%b}' % (said, said)
        assert dialect.ask(raw, {}, "m").call.conversation.messages[0].blocks == ({"type": "text", "text": f"a{read}z"},)
    with pytest.raises(BadRequest, match="not JSON"):
        dialect.ask(rb'{"max_tokens":9,"messages":[{"role":"user","content":"\ud83d"}', {}, "m")


def test_events_are_sorted_only_when_the_call_is_over() -> None:
    started, piece, ended = Started(1, 2), TextPiece("a"), Ended("end_turn", 3)
    assert sort_events([started, piece, ended]) == (started, [piece], ended)
    parts: list[list[Event]] = [[], [started], [piece, ended]]
    for part in parts:
        with pytest.raises(ValueError, match="not over"):
            sort_events(part)
