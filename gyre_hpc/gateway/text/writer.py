"""Prompts as text: what a chat template writes for a whole conversation, and for what is new behind a turn that is on the record.

The new part is found by a difference that needs no history: it is rendered behind a *stand-in* for the turn before it, which says a mark;
what follows the mark up to the first token that ends a turn is the stand-in's own (a policy writes that itself: the end of its call, the
close of a channel), and from there on is the new part. Invariants:
- the same messages behind the same calls give the same text, whatever the conversation says; what a template looks back at is no more than
  `Habits.looks_back` lets it see, and that this is enough was tried (probes.py);
- what lies between the mark and the end is one of `closings`, those that the probes saw: else the template is refused this conversation,
  never cut at a wrong place;
- a whole that the template refuses (roles that don't alternate, a question behind a tool's result) is joined of parts that it takes, each
  the same as in a whole that it would take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from gyre_hpc.gateway.dialects.canonical import Head, Message
from gyre_hpc.gateway.text.chat import ChatMessage, Habits, chat_of, split_calls, tool_schemas

MARK = "gyre5f3a9c"
BARE = Head()
THOUGHTS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<mm:think>", "</mm:think>"),
)
"""How families open and close a thought."""
_THOUGHT_END = re.compile(r"\s*(?:" + "|".join(rf"(?:{re.escape(a)}\s*)?(?:{re.escape(b)}\s*)?$" for a, b in THOUGHTS) + ")")


@dataclass(frozen=True)
class TemplateWriter:
    """One template with its special tokens by variable. `ends`: texts of the tokens with which a turn ends in a history."""

    template: str
    specials: dict[str, str]
    ends: tuple[str, ...]
    habits: Habits = field(default_factory=Habits)
    closings: frozenset[str] | None = field(default=None)
    """What a stand-in may say between the mark and its end; None: anything, while that is being found out."""

    def render(self, chat: list[ChatMessage], head: Head = BARE, prompt: bool = True) -> str:
        """What the template makes of chat messages; `prompt`: up to where an answer begins. Raises ValueError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = tool_schemas(head.tools) or ([] if self.habits.tool_list else None)
        options: dict[str, Any] = {"tools": tools, "chat_template": self.template, "add_generation_prompt": prompt, **self.specials}
        try:
            rendered: Any = render_jinja_template(conversations=[chat], **options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # whatever a template may stumble over
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return str(rendered[0][0])

    def whole(self, head: Head, messages: Sequence[Message]) -> str:
        """A whole prompt at once. Raises ValueError."""
        return self.render(chat_of(head.system, messages, self.habits), head)

    def root(self, head: Head, messages: Sequence[Message]) -> str:
        """A whole prompt; of parts, where the template refuses it at once. Raises ValueError."""
        try:
            self._check_order(messages)
            return self.whole(head, messages)
        except ValueError:
            parts = _parts(messages)
            if len(parts) < 2:
                raise
            text, before = self.whole(head, parts[0]), list(parts[0])
        return self._joined(text, before, parts[1:])

    def after(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> str:
        """What is written behind a turn, its end included, for `messages`; `before`: the conversation up to and with that turn.

        Raises ValueError.
        """
        parts = _parts(messages)
        try:
            self._check_order(messages)
            return self._after(messages, before)
        except ValueError:
            if len(parts) < 2 or not parts[0]:
                raise
            text = self._after(parts[0], before)
        return self._joined(text, [*before, *parts[0]], parts[1:])

    def answer(self, message: Message, before: Sequence[Message] = ()) -> tuple[str, bool]:
        """(an answer as a history has it, without its end; whether it stands behind what asks for one as that is, else without a thought).

        Raises ValueError: the template writes a turn in more than one way.
        """
        asked, after = Message("user", ({"type": "text", "text": "a"},)), [Message("user", ({"type": "text", "text": "b"},))]
        if message.tool_ids:
            after = [Message("user", tuple(_result(id, "b") for id in message.tool_ids))]
        if self.habits.single_calls and len(message.tool_ids) > 1:
            raise ValueError("the chat template takes one call in a turn")
        start = skeleton(before) if self.habits.looks_back > 1 else []
        opened, behind = self.root(BARE, [*start, asked]), self.after(after, [*start, asked, message])
        whole = self.root(BARE, [*start, asked, message, *after]) if start else self.whole(BARE, [asked, message, *after])
        exact = whole.startswith(opened)
        opened = opened if exact else thoughtless(opened)
        if not (whole.startswith(opened) and whole.endswith(behind)):
            raise ValueError("the chat template writes an answer otherwise than it asks for one")
        return whole[len(opened) : len(whole) - len(behind)], exact

    def cut(self, text: str) -> tuple[str, str]:
        """What follows a mark -> (what its turn still says, what is behind that, from the token that ends it). Raises ValueError."""
        found = self._end.search(text)
        if found is None:
            raise ValueError("the chat template does not end the turn before with a stop token")
        return text[: found.start()], text[found.start() :]

    def bare(self, closing: str, turns: Sequence[Message]) -> str:
        """What the last of `turns` says behind the mark, without the id of its call."""
        ids = [call["id"] for call in chat_of("", turns, self.habits)[-1].get("tool_calls", ())]
        before, found, behind = closing.rpartition(ids[-1]) if ids else ("", "", "")
        return f"{before}*{behind}" if found else closing

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.ends, key=len, reverse=True))) or "(?!)")

    def _check_order(self, messages: Sequence[Message]) -> None:
        if self.habits.in_parts and any(message.tool_ids for message in messages):
            raise ValueError("the chat template is not append-only in a history with calls")

    def _after(self, messages: Sequence[Message], before: Sequence[Message]) -> str:
        turns = self._stand_in(messages, before)
        text = self.render(chat_of("", [*turns, *messages], self.habits))
        _, marked, rest = text.partition(MARK)  # the first: `messages` may say it, too, where an agent reads this file
        if not marked:
            raise ValueError("it is not append-only: adding a turn takes away the text of the one before")
        closing, follow = self.cut(rest)
        if self.closings is not None and not self.closings & {closing, self.bare(closing, turns)}:  # an id may be a part of a word
            raise ValueError("the chat template ends a turn otherwise than it was seen to")
        return follow

    def _stand_in(self, messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
        """A short conversation that ends with the mark, and is to the template what `before` is."""
        asked = Message("user", ({"type": "text", "text": "a"},))
        if self.habits.looks_back == 0:
            return [asked, marked(())]
        turn = before[-1] if before and before[-1].role == "assistant" else Message("assistant", ())
        results = [block["tool_use_id"] for block in messages[0].blocks if block["type"] == "tool_result"] if messages else []
        calls = [(block["id"], block["name"]) for block in turn.blocks if block["type"] == "tool_use"]
        calls = calls if results else []
        if results and not calls:  # of a recording in which the calls are not told
            calls = [(id, "tool") for id in dict.fromkeys(results)]
        if self.habits.single_calls:
            calls = calls[-1:]
        start = skeleton(before[:-1]) if self.habits.looks_back > 1 and before else []
        return [*(start or [asked]), marked(calls)]

    def _joined(self, text: str, before: list[Message], parts: Sequence[Sequence[Message]]) -> str:
        """`text`, a prompt, and what follows it: answers (one message) and what stands behind each, in turns."""
        turns = [message for part in parts for message in part]
        if self.habits.single_calls:
            turns = split_calls(turns)
        for answer, follow in _answered(turns):
            said, exact = self.answer(answer, before)
            before = [*before, answer]
            text = (text if exact else thoughtless(text)) + said + self._after(follow, before)
            before += follow
        return text


def marked(calls: Sequence[tuple[str, str]]) -> Message:
    """A turn that says the mark, in its text or in the arguments of the last of `calls` (id, name)."""
    if not calls:
        return Message("assistant", ({"type": "text", "text": MARK},))
    blocks = [{"type": "tool_use", "id": id, "name": name, "input": {}} for id, name in calls]
    blocks[-1] |= {"input": {"a": MARK}}
    return Message("assistant", tuple(blocks))


def skeleton(messages: Sequence[Message]) -> list[Message]:
    """A conversation with its roles and its calls and no more."""
    bare = []
    for message in messages:
        calls = [{**block, "input": {}} for block in message.blocks if block["type"] == "tool_use"]
        results = [_result(block["tool_use_id"], "b") for block in message.blocks if block["type"] == "tool_result"]
        text = [{"type": "text", "text": "a"}] if any(block["type"] == "text" for block in message.blocks) else []
        blocks = [*text, *calls] if message.role == "assistant" else [*results, *text]
        bare.append(Message(message.role, tuple(blocks or [{"type": "text", "text": "a"}])))
    return bare


def thoughtless(text: str) -> str:
    """Without an open or empty thought and blanks at the end, which thinking templates write in one place and leave out in the other.

    Nor with the end of a thought alone: GLM-4.7 asks with `<think>` and writes `</think>` before the text of earlier turns.
    """
    found = _THOUGHT_END.search(text)
    return text[: found.start()] if found else text.rstrip()


def _result(id: str, shown: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": [shown], "is_error": False}


def _parts(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages cut at answers: what stands before the first, then answers and what follows them, alternating."""
    parts: list[list[Message]] = [[]]
    for message in messages:
        if (message.role == "assistant") != (len(parts) % 2 == 0):
            parts.append([])
        parts[-1].append(message)
    return parts


def _answered(turns: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """(an answer, what follows it). Raises ValueError: two answers in a row, or one that ends the conversation."""
    found: list[tuple[Message, list[Message]]] = []
    for turn in turns:
        if turn.role == "assistant":
            found.append((turn, []))
        else:
            found[-1][1].append(turn)
    if not all(follow for _, follow in found):
        raise ValueError("the chat template refuses this conversation, and it has two answers in a row, or ends with one")
    return found
