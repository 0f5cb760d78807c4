"""Templates in the manner of other families: which are append-only, what they are refused for, and that turns join to the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.families import DEEPSEEK, GLM, LLAMA, MISTRAL, QWEN_THINKING, Family, family_model

TOOL = {"name": "t", "description": "d", "input_schema": {"type": "object", "properties": {}}}
ASKED = Message("user", ({"type": "text", "text": "one"},))
AGAIN = Message("user", ({"type": "text", "text": "next"},))
OUTPUT = Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": ["out"], "is_error": False},))
ACCEPTED = {"llama": LLAMA, "qwen": QWEN_THINKING, "glm": GLM, "deepseek": DEEPSEEK}


@pytest.fixture(scope="module", params=ACCEPTED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TurnRenderer:
    return TurnRenderer(family_model(tmp_path_factory.mktemp(request.param), ACCEPTED[request.param]))


def whole(made: TurnRenderer, head: Head, *chat: dict[str, Any]) -> str:
    system = [{"role": "system", "content": head.system}] if head.system else []
    return made._writer.render([*system, *chat], head)


@pytest.mark.parametrize("head", [Head(), Head("sys"), Head("sys", (TOOL,))], ids=["bare", "system", "tools"])
def test_turns_join_to_what_the_template_makes_of_the_whole(made: TurnRenderer, head: Head) -> None:
    """Two answers, the first with a call; each drawn up to the token that ends it before what follows."""
    tokens = made.tokenizer
    first = [*tokens.encode("mine").ids, made.delta([OUTPUT], closed=False)[0]]
    second = [*tokens.encode("yours").ids, made.delta([AGAIN], closed=False)[0]]
    ids = [*made.root(Conversation(head, (ASKED,))), *first, *made.behind([OUTPUT], first[-1]), *second, *made.behind([AGAIN], second[-1])]
    chat = (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "mine"},
        {"role": "tool", "content": "out", "tool_call_id": "i"},
        {"role": "assistant", "content": "yours"},
        {"role": "user", "content": "next"},
    )
    expected = whole(made, head, *chat)
    for thought in ("<think>\n", "\n<think></think>\n", "<think></think>\n", "\n<think>"):  # written in one place, left out in the other
        expected = expected.replace(f"{thought}mine", "mine").replace(f"{thought}yours", "yours")
    shown = made.shown(ids)
    for opened in ("<think>\nmine", "<think>\nyours"):
        shown = shown.replace(opened, opened.removeprefix("<think>\n"))
    assert _loose(shown) == _loose(expected)


def _loose(text: str) -> str:
    """Without what thinking templates write at the end of a prompt only."""
    return text.removesuffix("<think>\n")


def test_a_turn_that_was_cut_is_closed_by_what_follows(made: TurnRenderer) -> None:
    for follow in (AGAIN, OUTPUT):
        full = made.delta([follow], closed=False)
        assert full[0] in made.stop_ids
        assert made.behind([follow], 65) == full
        assert made.behind([follow], full[0]) == full[1:]


def test_the_end_of_a_glm_turn_is_the_next_roles_token(tmp_path: Path) -> None:
    glm = TurnRenderer(family_model(tmp_path, GLM))
    named = glm.tokenizer.get_vocab().__getitem__
    assert glm.delta([OUTPUT], closed=False)[0] == named("<|observation|>")
    assert glm.delta([AGAIN], closed=False)[0] == glm.turn_end == named("<|user|>")
    assert named("<|observation|>") not in glm.behind([OUTPUT], named("<|observation|>"))


def test_text_of_answers_that_were_not_recorded(made: TurnRenderer) -> None:
    call = {"type": "tool_use", "id": "i", "name": "t", "input": {"a": 1}}
    for blocks, follow in ((({"type": "text", "text": "said"},), AGAIN), ((call,), OUTPUT)):
        ids = made.answer(Message("assistant", blocks))
        assert ids[-1] == made.delta([follow], closed=False)[0]
        assert ("said" if follow is AGAIN else '{"a": 1}') in made.shown(ids)


def test_thoughts_in_the_history_are_rendered_where_the_template_does(made: TurnRenderer) -> None:
    turn = Message("assistant", ({"type": "thinking", "thinking": "hmm"}, {"type": "text", "text": "said"}))
    shown = made.shown(made.root(Conversation(Head(), (ASKED, turn, OUTPUT))))
    assert "said" in shown
    assert ("hmm" in shown) == ("reasoning_content" in made._writer.template)


def test_every_control_token_in_a_tools_output_is_text(made: TurnRenderer) -> None:
    specials = [token.content for token in made.tokenizer.get_added_tokens_decoder().values() if token.special]
    output = Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": ["".join(specials)], "is_error": False},))
    named = {made.tokenizer.token_to_id(token) for token in specials}
    plain, forged = made.delta([OUTPUT], closed=False), made.delta([output], closed=False)
    assert [i for i in forged if i in named] == [i for i in plain if i in named]
    assert all(token in made.shown(forged) for token in specials)


def test_tools_that_move_with_the_question_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not append-only") as refused:
        TurnRenderer(family_model(tmp_path, MISTRAL))
    assert "chat_template.jinja" in refused.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        ("message.content | trim + '<|eot_id|>'", "(message.content if loop.last else '...') + '<|eot_id|>'"),
        ("'Cutting Knowledge", "(messages | length | string) + 'Cutting Knowledge"),
    ],
)
def test_histories_that_change_are_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    template = LLAMA.template.replace(*change)
    assert template != LLAMA.template
    with pytest.raises(ConfigError, match="not append-only"):
        TurnRenderer(family_model(tmp_path, Family(LLAMA.control, LLAMA.stops, template)))


ALTERNATES = """{%- for message in messages if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("seen", ["", "{%- if loop.last -%}{{- 'last' -}}{%- endif -%}"], ids=["kept", "changed"])
def test_answers_that_may_follow_each_other_only_behind_a_call_are_looked_at_there(tmp_path: Path, seen: str) -> None:
    """As Ministral; what it writes behind a tool's result must still stay when an answer follows."""
    template = ALTERNATES + LLAMA.template.replace(
        "message.content | tojson + '<|eot_id|>' -}}", "message.content | tojson + '<|eot_id|>' -}}" + seen
    )
    family = Family(LLAMA.control, LLAMA.stops, template)
    if not seen:
        assert TurnRenderer(family_model(tmp_path, family)).turn_end >= 0
        return
    with pytest.raises(ConfigError, match="a second answer changes"):
        TurnRenderer(family_model(tmp_path, family))


def changed(family: Family, *changes: tuple[str, str]) -> Family:
    template = family.template
    for before, after in changes:
        assert template.count(before) == 1
        template = template.replace(before, after)
    return Family(family.control, family.stops, template)


def test_a_history_in_which_thoughts_only_end(tmp_path: Path) -> None:
    """GLM-4.7: asked with an open thought; where that is dropped, its end stays."""
    asked = ("{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}", "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}")
    glm = changed(GLM, asked, ("{{- '<|assistant|>\\n<think>' -}}", "{{- '<|assistant|>' -}}"), ("{{- '</think>\\n' +", "{{- '</think>' +"))
    made = TurnRenderer(family_model(tmp_path, glm))
    assert made.opens_thought
    assert made.shown(made.root(Conversation(Head(), (ASKED,)))).endswith("<|assistant|><think>")
    assert made.shown(made.answer(Message("assistant", ({"type": "text", "text": "said"},)))) == "</think>said<|user|>"


def test_a_history_in_which_thoughts_only_end_and_a_question_that_ended_its_own(tmp_path: Path) -> None:
    """DeepSeek-V3.2, told not to think."""
    says = "<\uff5cAssistant\uff5c>' -}}"
    last = f"and messages[-1].role == 'user' -%}}{{{{- '{says}"
    template = DEEPSEEK.template.replace(last, last.replace(says, "<\uff5cAssistant\uff5c><think></think>' -}}"))
    template = template.replace(says, "<\uff5cAssistant\uff5c></think>' -}}")
    assert (template.count("<think>"), template.count("|</think>") + template.count("\uff5c></think>")) == (1, 1)
    made = TurnRenderer(family_model(tmp_path, Family(DEEPSEEK.control, DEEPSEEK.stops, template)))
    assert not made.opens_thought
    assert made.shown(made.answer(Message("assistant", ({"type": "text", "text": "said"},)))) == "said<\uff5cend\uff5c>"


def test_arguments_are_text_where_the_template_wants_text(tmp_path: Path) -> None:
    """DeepSeek-V3: in a history that was not recorded here."""
    call: dict[str, Any] = {"type": "tool_use", "id": "i", "name": "t", "input": {"a": "\u00e9"}}
    history = Conversation(Head(), (ASKED, Message("assistant", (call,)), OUTPUT))
    text = changed(DEEPSEEK, (" + call.function.arguments | tojson -}}", " + call.function.arguments -}}"))
    for family in (text, DEEPSEEK):
        made = TurnRenderer(family_model(tmp_path / str(family is text), family))
        assert 'call t{"a": "\u00e9"}<' in made.shown(made.root(history))
    assert call["input"] == {"a": "\u00e9"}


def test_a_template_that_writes_no_calls_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = changed(
        GLM, ("{%- for call in message.tool_calls or [] -%}", "{%- for call in message.tool_calls or [] -%}{{- raise_exception('no') -}}")
    )
    TurnRenderer(family_model(tmp_path, refusing))
    assert "no place for calls" in caplog.text
    caplog.clear()
    TurnRenderer(family_model(tmp_path, GLM))
    assert "no place for" not in caplog.text
