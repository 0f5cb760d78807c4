"""What a chat template takes, found by trying: each question is a small conversation that it refuses, or in which something is missing.

Invariant: a habit other than the default is taken on only where the default was refused or left something out, and the other was not; so a
template that takes everything is rendered as it always was. Order: later questions are asked with what the earlier ones found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gyre_hpc.gateway.dialects.canonical import Head, Message
from gyre_hpc.gateway.text.chat import KIMI_IDS, KIMI_TURN_IDS, SHORT_IDS, Habits
from gyre_hpc.gateway.text.writer import BARE, MARK, TemplateWriter, marked, thoughtless

SHOWN = "gyre7d1b42"
"""The name of the probes' tool, and what it shows."""
_SAID = "gyre2e8f07"
_KIMI = "<|tool_calls_section_begin|>"


def find_habits(writer: TemplateWriter) -> TemplateWriter:
    """`writer` with the habits that its template turned out to have."""
    for find in (_content, _system, _alternates, _calls, _single_calls, _thoughts, _ids):
        writer = replace(writer, habits=find(writer))
    return writer


def says(text: str) -> Message:
    """A user's message."""
    return Message("user", ({"type": "text", "text": text},))


def shows(*ids: str, text: str = SHOWN) -> Message:
    """Results of calls."""
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": [text], "is_error": False} for id in ids]
    return Message("user", tuple(blocks))


def calls(*ids: str) -> Message:
    """A turn with calls of the probes' tool, the mark in the last."""
    return marked([(id, SHOWN) for id in ids])


def _written(writer: TemplateWriter, habits: Habits, messages: Iterable[Message], head: Head = BARE) -> str:
    """What the template writes; nothing, where it refuses."""
    try:
        return replace(writer, habits=habits).whole(head, tuple(messages))
    except ValueError:
        return ""


def _first(writer: TemplateWriter, messages: Iterable[Message], wanted: Iterable[str], head: Head = BARE, **options: Any) -> Habits:
    """The first of two habits, as it is and with `options`, by which all that is wanted is written; else as it is."""
    messages, wanted = tuple(messages), tuple(wanted)
    for habits in (writer.habits, replace(writer.habits, **options)):
        text = _written(writer, habits, messages, head)
        if text and all(part in text for part in wanted):
            return habits
    return writer.habits


def _content(writer: TemplateWriter) -> Habits:
    """Plain texts and no list of tools, if that will do; a template that wants both otherwise is given both."""
    plain = writer.habits
    for parts, tool_list in ((False, False), (False, True), (True, False), (True, True)):
        habits = replace(plain, parts=parts, tool_list=tool_list)
        if _SAID in _written(writer, habits, [says(_SAID)]):
            return habits
    return plain


def _system(writer: TemplateWriter) -> Habits:
    return _first(writer, [says("a")], [_SAID], Head(_SAID), system=False)


def _alternates(writer: TemplateWriter) -> Habits:
    return _first(writer, [says("a"), says(_SAID)], [_SAID], alternates=True)


def _calls(writer: TemplateWriter) -> Habits:
    """How calls and their results are written; in the last resort the results by the user, the calls as text."""
    plain = writer.habits
    ways = [
        replace(plain, bare_calls=bare_calls, no_content=no_content, ids=ids, text_arguments=text_arguments)
        for bare_calls, no_content in ((False, False), (True, False), (True, True))
        for ids in ((KIMI_IDS,) if _KIMI in writer.template else ("", SHORT_IDS))
        for text_arguments in (False, True)
    ]
    told = [habits for habits in ways if _tells(writer, habits, SHOWN)]
    for habits in [habits for habits in told if _in_order(writer, habits)] + told:
        return habits
    for habits in (replace(plain, calls=False), replace(plain, tools=False), replace(plain, calls=False, tools=False)):
        if _tells(writer, habits, SHOWN):
            return habits
    return plain


def _tells(writer: TemplateWriter, habits: Habits, name: str) -> bool:
    """Whether a call's name and arguments are written, and behind them what the tool shows."""
    text = _written(writer, habits, [says("a"), calls("i"), shows("i", text=_SAID)])
    call, _, result = text.partition(MARK)
    return name in call and _SAID in result


def _in_order(writer: TemplateWriter, habits: Habits) -> bool:
    """Whether the text of a turn stands before its call."""
    turn = Message("assistant", (*says(_SAID).blocks, *calls("i").blocks))
    return _SAID in _written(writer, habits, [says("a"), turn, shows("i")]).partition(MARK)[0]


def _single_calls(writer: TemplateWriter) -> Habits:
    if not writer.habits.calls:
        return writer.habits
    other = SHOWN + "x"
    turn = marked([("i", other), ("j", SHOWN)])
    return _first(writer, [says("a"), turn, shows("i", "j")], [other, MARK], single_calls=True)


def _thoughts(writer: TemplateWriter) -> Habits:
    for key in ("reasoning_content", "reasoning", "thinking"):
        habits = replace(writer.habits, thoughts=key)
        turn = Message("assistant", ({"type": "thinking", "thinking": _SAID}, *calls("i").blocks))
        if _SAID in _written(writer, habits, [says("a"), turn, shows("i")]):
            both = Message("assistant", (*turn.blocks, *says(SHOWN + "x").blocks))
            return _first(replace(writer, habits=habits), [says("a"), both, shows("i")], [_SAID, SHOWN + "x", MARK], one_place=True)
    return writer.habits


def find_inside(writer: TemplateWriter) -> TemplateWriter:
    """`writer`, told whether a system message may stand behind an answer; asked for once it is known with what answers end."""
    note = Message("system", ({"type": "text", "text": _SAID},))
    whole, asked = (_written(writer, writer.habits, turns) for turns in ([says("a"), marked(()), note, says("b")], [says("a")]))
    ended, said, _ = whole.partition(MARK)[2].partition(_SAID)
    ends = any(end in ended for end in writer.ends)  # GLM: what ends an answer before a question is the question's own token
    fine = said and ends and whole.startswith(thoughtless(asked))  # some move the system prompt there
    return writer if fine else replace(writer, habits=replace(writer.habits, system_inside=False))


def _ids(writer: TemplateWriter) -> Habits:
    """Kimi K2 names its calls itself and knows their results by those names; an older template of it begins anew in each turn."""
    habits = writer.habits
    if habits.ids != KIMI_IDS:
        return habits
    text = _written(writer, habits, [says("a"), calls("i"), shows("i"), calls("j"), shows("j")])
    return habits if f"{SHOWN}:1" in text.partition(MARK)[2].partition(MARK)[0] else replace(habits, ids=KIMI_TURN_IDS)
