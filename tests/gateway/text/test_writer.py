"""Of random histories of every family: what is rendered by turns is what the template makes of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.chat import split_calls
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.writer import MARK, THOUGHTS, skeleton, thoughtless
from tests.gateway.fakes import CHATML, tiny_model
from tests.gateway.families import COMMAND, DEEPSEEK, GEMMA, GEMMA4, GLM, HARMONY, KIMI, LLAMA, NEMO, QWEN_THINKING, family_model
from tests.gateway.text.histories import HEADS, histories, text

FAMILIES = {
    "llama": LLAMA,
    "qwen": QWEN_THINKING,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "gpt-oss": HARMONY,
    "command": COMMAND,
    "gemma": GEMMA,
    "gemma 4": GEMMA4,
    "kimi": KIMI,
    "nemo": NEMO,
    "chatml": None,
}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TurnRenderer:
    folder, family = tmp_path_factory.mktemp("family"), FAMILIES[request.param]
    return TurnRenderer(tiny_model(folder, CHATML) if family is None else family_model(folder, family))


def bare(said: str) -> str:
    """Without blanks, and without the tags of thoughts, which a template writes in one place and leaves out in the other."""
    for tags in THOUGHTS:
        for tag in tags:
            said = said.replace(tag, "")
    return "".join(said.split())


def answers(messages: list[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


@settings(max_examples=12, deadline=None)
@given(HEADS, histories(thoughts=False))
def test_turns_by_themselves_are_what_the_template_makes_of_the_whole(made: TurnRenderer, head: Head, messages: list[Message]) -> None:
    """Token by token: the root, each answer as the template writes it, and what is new behind it; also where it refuses the whole."""
    messages = split_calls(messages) if made._writer.habits.single_calls else messages
    places = answers(messages)
    ids, recorded = made.root(Conversation(head, tuple(messages[: places[0]]))), []
    for place, following in zip(places, [*places[1:], len(messages)], strict=True):
        recorded.append(list(ids))
        said = made.answer(messages[place], messages[:place])
        new = made.behind(messages[place + 1 : following], said[-1], messages[: place + 1])
        ids = [*ids, *said, *new]
        assert ids[: len(recorded[-1])] == recorded[-1]
    assert bare(made.shown(ids)) == bare(made.shown(made.root(Conversation(head, tuple(messages)))))


@settings(max_examples=12, deadline=None)
@given(HEADS, histories(), st.data())
def test_what_is_new_is_the_end_of_the_whole(made: TurnRenderer, head: Head, messages: list[Message], data: st.DataObject) -> None:
    """And depends on no text before it: what was said there may be anything."""
    messages = split_calls(messages) if made._writer.habits.single_calls else messages
    last = answers(messages)[-1]
    new, before = messages[last + 1 :], messages[: last + 1]
    ids = made.delta(new, False, before)
    assert ids[0] in made.stop_ids or ids[0] == made._other_end
    assert ids == made.delta(new, False, skeleton(before))
    whole = made.root(Conversation(head, tuple(messages)))
    assert "".join(made.shown(whole[-len(ids) :]).split()) == "".join(made.shown(ids).split())


@settings(max_examples=5, deadline=None)
@given(histories())
def test_calls_at_once_are_shown_their_results(made: TurnRenderer, messages: list[Message]) -> None:
    """Also by templates that write one call in a turn: the policy drew two, and both have answers."""
    last = answers(messages)[-1]
    shown = bare(made.shown(made.delta(messages[last + 1 :], False, messages[: last + 1])))
    for message in messages[last + 1 :]:
        for block in message.blocks:
            said = "".join(block["content"]) if block["type"] == "tool_result" else block["text"]
            assert bare(said) in shown.replace('\\"', '"').replace("\\n", "").replace("\\u00e9", "\u00e9")


def test_harmony_is_told_the_call_and_keeps_the_end_that_was_drawn(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = TurnRenderer(family_model(tmp_path_factory.mktemp("harmony"), HARMONY))
    named = made.tokenizer.token_to_id
    call = Message("assistant", ({"type": "tool_use", "id": "i", "name": "read", "input": {}},))
    result = Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": ["out"], "is_error": False},))
    asked, again = Message("user", (text("one"),)), Message("user", (text("next"),))
    told = '<|start|>functions.read to=assistant<|channel|>commentary<|message|>"out"<|end|><|start|>assistant'
    assert made.shown(made.behind([result], named("<|call|>"), [asked, call])) == told
    answer = Message("assistant", (text("said"),))
    drawn = made.behind([again], named("<|return|>"), [asked, answer])
    assert made.shown(drawn) == "<|start|>user<|message|>next<|end|><|start|>assistant"
    assert made.shown(made.behind([again], 65, [asked, answer])) == "<|end|>" + made.shown(drawn)  # it was cut: closed by context
    assert made.turn_end == named("<|end|>")


def test_ids_of_calls_are_the_policys_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kimi counts its calls over the conversation, and knows the results by that."""
    made = TurnRenderer(family_model(tmp_path_factory.mktemp("kimi"), KIMI))
    turns = []
    for id, name in (("toolu_1", "run"), ("toolu_2", "read")):
        turns.append(Message("assistant", ({"type": "tool_use", "id": id, "name": name, "input": {}},)))
        turns.append(Message("user", ({"type": "tool_result", "tool_use_id": id, "content": ["out"], "is_error": False},)))
    before = [Message("user", (text("one"),)), *turns[:3]]
    assert "## Return of functions.read:1\nout" in made.shown(made.delta(turns[3:], True, before))
    assert "functions.run:0<|tool_call_argument_begin|>" in made.shown(made.root(Conversation(Head(), (*before, turns[3]))))


def test_a_turn_that_ends_otherwise_than_it_was_seen_to_is_refused(made: TurnRenderer) -> None:
    """What is between the mark and the token that ends a turn was seen by the probes; anything else is no place to cut."""
    writer = made._writer
    closed = [Message("assistant", (text("x"),)), Message("user", (text("y"),))]
    assert writer.closings is not None
    odd = type(writer)(
        writer.template.replace("message.content", "(message.content + ' odd')"), writer.specials, writer.ends, writer.habits
    )
    narrow = type(odd)(odd.template, odd.specials, odd.ends, odd.habits, writer.closings)
    assert odd.template != writer.template
    assert odd.after(closed[1:], closed[:1]) != ""
    with pytest.raises(ValueError, match="otherwise than it was seen"):
        narrow.after(closed[1:], closed[:1])


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("<|a|>\n<think>\n", "<|a|>"),
        ("<|a|><think>\n\n</think>\n\n", "<|a|>"),
        ("<|a|></think>", "<|a|>"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model"),
        ("a <think> b", "a <think> b"),
    ],
)
def test_thoughts_at_the_end_of_a_prompt(said: str, kept: str) -> None:
    assert thoughtless(said) == kept


def test_a_skeleton_has_the_calls_and_no_text() -> None:
    call = {"type": "tool_use", "id": "i", "name": "run", "input": {"c": MARK}}
    before = [Message("user", (text(MARK),)), Message("assistant", (text(MARK), call)), Message("system", (text(MARK),))]
    found = skeleton(before)
    assert [message.role for message in found] == ["user", "assistant", "system"]
    assert found[1].tool_ids == ("i",)
    assert all(MARK.encode() not in message.canonical for message in found)
    assert skeleton(found) == found
