"""What a template has no place for is said otherwise, and nothing is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_hpc.gateway.dialects.canonical import Block, Message
from gyre_hpc.gateway.text.chat import KIMI_IDS, KIMI_TURN_IDS, SHORT_IDS, Habits, chat_of, split_calls
from tests.gateway.text.histories import text

PLAIN = Habits()


def call(id: str, name: str = "run") -> Block:
    return {"type": "tool_use", "id": id, "name": name, "input": {"c": "\u00e9"}}


def result(id: str, shown: str) -> Block:
    return {"type": "tool_result", "tool_use_id": id, "content": [shown], "is_error": False}


ASKED = Message("user", (text("one"),))
CALLED = Message("assistant", ({"type": "thinking", "thinking": "hmm"}, text("I look."), call("toolu_1"), call("toolu_2", "read")))
SHOWN = Message("user", (result("toolu_2", "two"), result("toolu_1", "one"), text("note")))


def test_a_template_that_takes_everything_is_given_it_as_it_is() -> None:
    chat = chat_of("Sys.", [ASKED, CALLED, SHOWN, Message("system", (text("inner"),))], PLAIN)
    assert [turn["role"] for turn in chat] == ["system", "user", "assistant", "tool", "tool", "user", "system"]
    assert chat[2]["content"] == "I look."
    assert chat[2]["reasoning_content"] == "hmm"
    assert chat[2]["tool_calls"][0]["function"] == {"name": "run", "arguments": {"c": "\u00e9"}}
    assert [turn["tool_call_id"] for turn in chat if turn["role"] == "tool"] == ["toolu_2", "toolu_1"]


def test_a_system_prompt_is_the_users_first_words() -> None:
    chat = chat_of("Sys.", [ASKED, Message("system", (text("inner"),))], replace(PLAIN, system=False, system_inside=False))
    assert chat == [{"role": "user", "content": "Sys.\n\none"}, {"role": "user", "content": "inner"}]


def test_roles_alternate() -> None:
    habits = replace(PLAIN, alternates=True, tools=False, system_inside=False)
    chat = chat_of("", [ASKED, CALLED, SHOWN, Message("system", (text("inner"),))], habits)
    assert [turn["role"] for turn in chat] == ["user", "assistant", "user"]
    assert chat[2]["content"] == "two\n\none\nnote\n\ninner"


def test_calls_that_have_no_place_are_text_as_our_parser_reads_it() -> None:
    (turn,) = chat_of("", [CALLED], replace(PLAIN, calls=False))
    assert turn["content"].startswith('I look.\n<tool_call>\n{"name": "run", "arguments": {"c": "\u00e9"}}\n</tool_call>\n<tool_call>')
    assert "tool_calls" not in turn


def test_each_call_has_a_turn_with_its_result() -> None:
    split = split_calls([ASKED, CALLED, SHOWN])
    assert [(message.role, message.tool_ids) for message in split[1:]] == [
        ("assistant", ("toolu_1",)),
        ("user", ()),
        ("assistant", ("toolu_2",)),
        ("user", ()),
    ]
    assert split[1].text == "I look."
    assert split[2].blocks == (result("toolu_1", "one"),)
    assert split[4].blocks == (result("toolu_2", "two"), text("note"))
    assert split_calls(split) == split


def test_calls_without_results_are_split_too() -> None:
    split = split_calls([CALLED, ASKED])
    assert [message.role for message in split] == ["assistant", "assistant", "user"]


def test_text_before_calls_stands_by_itself() -> None:
    said, called = chat_of("", [CALLED], replace(PLAIN, bare_calls=True, no_content=True))
    assert (said["content"], said["reasoning_content"], called["content"]) == ("I look.", "hmm", None)
    assert len(called["tool_calls"]) == 2


def test_one_place_for_a_thought_and_a_text() -> None:
    (turn,) = chat_of("", [CALLED], replace(PLAIN, thoughts="thinking", one_place=True))
    assert (turn["thinking"], turn["content"]) == ("hmm\nI look.", "")


def test_arguments_as_text_and_content_as_parts() -> None:
    (turn,) = chat_of("", [CALLED], replace(PLAIN, text_arguments=True, parts=True))
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"c": "\u00e9"}'
    assert turn["content"] == [{"type": "text", "text": "I look."}]


@pytest.mark.parametrize(
    ("ids", "first", "second", "third"),
    [
        (KIMI_IDS, "functions.run:0", "functions.read:1", "functions.run:2"),
        (KIMI_TURN_IDS, "functions.run:0", "functions.read:1", "functions.run:0"),
    ],
)
def test_calls_as_kimi_names_them(ids: str, first: str, second: str, third: str) -> None:
    again = Message("assistant", (call("toolu_3"),))
    chat = chat_of("", [ASKED, CALLED, SHOWN, again, Message("user", (result("toolu_3", "x"),))], replace(PLAIN, ids=ids))
    assert [made["id"] for turn in chat for made in turn.get("tool_calls", ())] == [first, second, third]
    assert [turn["tool_call_id"] for turn in chat if turn["role"] == "tool"] == [second, first, third]


def test_short_ids_are_the_same_wherever_they_stand() -> None:
    habits = replace(PLAIN, ids=SHORT_IDS)
    known = [made["id"] for made in chat_of("", [CALLED], habits)[0]["tool_calls"]]
    alone = [turn["tool_call_id"] for turn in chat_of("", [SHOWN], habits) if turn["role"] == "tool"]
    assert alone == known[::-1]
    assert all(len(id) == 9 and id.isalnum() for id in known)
