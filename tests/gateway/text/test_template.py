"""Rendering by turns gives, token by token, what the template makes of the whole conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message, normalise_messages
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.writer import MARK
from tests.gateway.fakes import CHATML, tiny_model

TOOL = {"name": "bash", "description": "Run <it> & see", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
HEADS = [Head(), Head("Sys é."), Head("Sys.", (TOOL,))]


def turns(*messages: tuple[str, Any]) -> tuple[Message, ...]:
    return normalise_messages([{"role": role, "content": content} for role, content in messages])


def result(output: str, id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": output}


def said(renderer: TurnRenderer, text: str) -> list[int]:
    return [*renderer.tokenizer.encode(text, add_special_tokens=False).ids, renderer.turn_end]


@pytest.mark.parametrize("head", HEADS)
def test_root_and_deltas_are_the_whole_conversation(renderer: TurnRenderer, head: Head) -> None:
    """Three turns, the second with tool calls: what was sampled in canonical spelling + deltas == the whole rendered at once."""
    call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls é"}}
    first, second, third = turns(("user", "go\n")), turns(("user", [result("a\n"), result("b", "t2")])), turns(("user", "more"))
    one = turns(("assistant", [{"type": "text", "text": "I look."}, call]))
    two = turns(("assistant", "Fine."))
    spoken = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n</tool_call>'
    by_turns = [
        *renderer.root(Conversation(head, first)),
        *said(renderer, spoken),
        *renderer.delta(second, closed=True),
        *said(renderer, "Fine."),
        *renderer.delta(third, closed=True),
    ]
    assert by_turns == renderer.root(Conversation(head, (*first, *one, *second, *two, *third)))


def test_rendering_is_that_of_transformers(model: Path, renderer: TurnRenderer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), chat_template=CHATML)
    tools = [{"type": "function", "function": {"name": "bash", "description": TOOL["description"], "parameters": TOOL["input_schema"]}}]
    chat = [{"role": "system", "content": "Sys."}, {"role": "user", "content": "go"}]
    expected = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert renderer.root(Conversation(HEADS[2], turns(("user", "go")))) == expected


def test_a_cut_turn_is_closed_by_context(renderer: TurnRenderer) -> None:
    new = turns(("user", "go on"))
    assert renderer.delta(new, closed=False) == [renderer.turn_end, *renderer.delta(new, closed=True)]


def test_a_text_that_says_our_mark_is_rendered_whole(renderer: TurnRenderer) -> None:
    """As when an agent reads template.py."""
    said = f"before {MARK} behind"
    plain = renderer.shown(renderer.delta(turns(("user", [result("before X behind")])), closed=True))
    assert renderer.shown(renderer.delta(turns(("user", [result(said)])), closed=True)) == plain.replace("X", MARK)


def test_split_shares_the_head(renderer: TurnRenderer) -> None:
    one = renderer.split(renderer.root(Conversation(HEADS[2], turns(("user", "a")))))
    other = renderer.split(renderer.root(Conversation(HEADS[2], turns(("user", "b")))))
    assert len(one) == 2
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert [*one[0], *one[1]] == renderer.root(Conversation(HEADS[2], turns(("user", "a"))))


def test_system_messages_inside_the_conversation(renderer: TurnRenderer) -> None:
    text = renderer.text(renderer.delta(turns(("system", "note"), ("user", "x")), closed=True))
    assert "<|im_start|>system\nnote<|im_end|>" in text
    leading = renderer.root(Conversation(Head(), turns(("system", "Sys."), ("user", "go"))))
    assert leading == renderer.root(Conversation(Head("Sys."), turns(("user", "go"))))


def test_a_template_without_inner_system_messages_gets_them_as_user(tmp_path: Path) -> None:
    template = CHATML.replace("(message.role == 'system' and not loop.first)", "false") + (
        "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}"
        "{{ raise_exception('no') }}{%- endif -%}{%- endfor -%}"
    )
    other = TurnRenderer(tiny_model(tmp_path, template))
    assert "<|im_start|>user\nnote<|im_end|>" in other.text(other.delta(turns(("system", "note"), ("user", "x")), closed=True))


def test_text_leaves_out_the_token_that_ended_the_turn(renderer: TurnRenderer) -> None:
    assert renderer.text(said(renderer, "né")) == "né"
    assert renderer.text(said(renderer, "né")[:-1]) == "né"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        # thoughts of earlier turns vanish: fine; the number of turns in the head: not
        (lambda t: "{{- messages | length -}}" + t, "append-only"),
        (
            lambda t: t.replace("'\\n' + message.content + '<|im_end|>", "'\\n' + (message.content if loop.last else '...') + '<|im_end|>"),
            "append-only",
        ),
        (
            lambda t: t.replace(
                "{{- '<|im_end|>\\n' -}}\n{%- elif message.role == 'tool'", "{{- '\\n' -}}\n{%- elif message.role == 'tool'"
            ),
            "no stop token",
        ),
        (lambda t: "{{- raise_exception('never') -}}" + t, "never"),
        # an answer that is not the last one is followed by another word
        (
            lambda t: t.replace(
                "message.content + '\\n</tool_response>'", "message.content + ('' if loop.last else '.') + '\\n</tool_response>'"
            ),
            "a second answer",
        ),
        # answers begin otherwise in the history than they are asked for, and not all alike
        (
            lambda t: t.replace(
                "'<|im_start|>assistant\\n' + message", "'<|im_start|>assistant\\n' + ('A' if loop.index0 < 2 else 'B') + message"
            ),
            "begins otherwise in the history",
        ),
    ],
)
def test_templates_that_are_refused(tmp_path: Path, change: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        TurnRenderer(tiny_model(tmp_path, change(CHATML)))
    assert str(tmp_path) in refused.value.what
    assert "append-only" in refused.value.remedy


def test_what_is_no_reason_to_refuse_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blanks that come once an answer follows (as Hermes writes them), and tools that the template does not tell of."""
    blanks = CHATML.replace("'\\n</tool_response>'", "'\\n</tool_response>' + ('' if loop.last else '\\n')")
    TurnRenderer(tiny_model(tmp_path / "blanks", blanks))
    TurnRenderer(tiny_model(tmp_path / "tools", CHATML.replace("{%- for tool in tools -%}", "{%- for tool in [] -%}")))
    assert [("other blanks" in line, "of its tools" in line) for line in caplog.messages] == [(True, False), (False, True)]
    caplog.clear()
    TurnRenderer(tiny_model(tmp_path / "good"))
    assert caplog.messages == []


def test_a_thinking_template_is_accepted_and_opens_the_thought(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
    )
    assert template != CHATML
    assert TurnRenderer(tiny_model(tmp_path, template)).opens_thought


def test_a_template_that_wants_a_list_of_tools_gets_an_empty_one(tmp_path: Path) -> None:
    template = "{%- for tool in tools -%}{%- endfor -%}" + CHATML
    plain = TurnRenderer(tiny_model(tmp_path, template))
    assert plain.text(plain.root(Conversation(Head(), turns(("user", "a"))))).startswith("<|im_start|>user")


def test_missing_parts_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TurnRenderer(tmp_path / "nowhere")
    model = tiny_model(tmp_path / "m")
    (model / "generation_config.json").write_text("{}")
    assert TurnRenderer(model).stop_ids  # the tokenizer's own
    (model / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="names no end-of-turn token"):
        TurnRenderer(model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        TurnRenderer(model)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 264), max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_decoding_by_pieces_is_decoding_the_whole(renderer: TurnRenderer, ids: list[int], cuts: list[int]) -> None:
    """Any ids, half characters and broken UTF-8 included, cut anywhere."""
    ids = [i for i in ids if i not in renderer.stop_ids]
    decoder = renderer.decoder()
    text, at = "", 0
    for cut in [*sorted(min(c, len(ids)) for c in cuts), len(ids)]:
        text += decoder.feed(ids[at:cut])
        at = cut
    assert text + decoder.finish() == renderer.text(ids)
