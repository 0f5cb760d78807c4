"""Normalised turns as the messages that a chat template reads, with what its family's template can't read said otherwise.

Templates differ in what they take: `Habits` says what this one does, as found by trying (habits.py), and `chat_of` obeys. Invariants:
- nothing that a harness said is left out: where a template has no place for it, it is said in another role or as text;
- a turn that the policy sampled and that is on the record is never written by this: only what is new, and what came from elsewhere;
- with the default habits (ChatML and most templates of today) a message is what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from gyre_hpc.gateway.dialects.canonical import Block, Message
from gyre_hpc.gateway.text.toolcalls import CALL_CLOSE, CALL_OPEN

ChatMessage = dict[str, Any]
SHORT_IDS, KIMI_IDS, KIMI_TURN_IDS = "short", "kimi", "kimi-turn"
_SHORT = 9
"""Letters and digits that Mistral's templates want in the id of a call."""


@dataclass(frozen=True)
class Habits:
    """What a template takes. The defaults: everything.

    - `parts`: it wants the content of a message as a list of parts; `tool_list`: an empty list where there are no tools.
    - `system`, `system_inside`: it has a place for a system prompt, for system messages further on; else they are the user's.
    - `tools`: for messages of tools (else the user's); `calls`: for calls (else they are text, as our own parser reads it).
    - `text_arguments`: arguments are JSON text. `bare_calls`: the text of a turn with calls stands in a message before them (else it would
      be dropped, or stand behind their results); `no_content`: a message of calls has no content, not even an empty one.
    - `single_calls`: one call in a turn (else each has a turn of its own, with its result).
    - `alternates`: no two user messages in a row (they are joined).
    - `ids`: of calls: "" as they are, SHORT_IDS nine letters and digits, KIMI_IDS `functions.NAME:N` counted over the conversation,
      KIMI_TURN_IDS over the turn.
    - `thoughts`: the key of a thought; `one_place`: in front of a call there is one place for a thought and a text.
    - `in_parts`: a history with calls is never written at once: the template is not append-only there, but writes each turn well by itself.
    - `looks_back`: what new messages are written by: 0 themselves, 1 also the calls of the turn before them, 2 all turns before.
    """

    parts: bool = False
    tool_list: bool = False
    system: bool = True
    system_inside: bool = True
    tools: bool = True
    calls: bool = True
    text_arguments: bool = False
    single_calls: bool = False
    alternates: bool = False
    ids: str = ""
    bare_calls: bool = False
    no_content: bool = False
    thoughts: str = "reasoning_content"
    one_place: bool = False
    in_parts: bool = False
    looks_back: int = 0


def chat_of(system: str, messages: Sequence[Message], habits: Habits, first: bool = True) -> list[ChatMessage]:
    """`system` (or "") and turns as chat messages; `first`: the conversation begins with them."""
    chat: list[ChatMessage] = []
    if system:
        chat.append({"role": "system" if habits.system else "user", "content": system})
    for message in split_calls(messages) if habits.single_calls else messages:
        for turn in _turns(message, habits, first and not chat):
            begun = bool(system) and not habits.system and chat == [{"role": "user", "content": system}]
            _append(chat, turn, habits.alternates or begun)
    if habits.ids:
        _rename(chat, habits.ids)
    if habits.parts:
        chat = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} if turn["content"] is not None else turn for turn in chat]
    return chat


def split_calls(messages: Iterable[Message]) -> list[Message]:
    """Turns with several calls as turns with one each, its result behind it; what else follows stands behind the last."""
    split: list[Message] = []
    for message in messages:
        calls = [] if not split or split[-1].role != "assistant" else [b for b in split[-1].blocks if b["type"] == "tool_use"]
        if message.role != "user" or len(calls) < 2:
            split.append(message)
            continue
        said = tuple(block for block in split.pop().blocks if block["type"] != "tool_use")
        left = list(message.blocks)
        for number, call in enumerate(calls):
            split.append(Message("assistant", (*(said if number == 0 else ()), call)))
            own = [b for b in left if b["type"] == "tool_result" and b["tool_use_id"] == call["id"]]
            left = [block for block in left if block not in own]
            blocks = (*own, *left) if number == len(calls) - 1 else tuple(own)
            split += [Message("user", blocks)] if blocks else []
    return split


def tool_schemas(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions as templates read them."""
    functions = ({"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]} for tool in tools)
    return [{"type": "function", "function": function} for function in functions]


def _turns(message: Message, habits: Habits, first: bool) -> list[ChatMessage]:
    if message.role == "assistant":
        return _assistant(message, habits)
    system = habits.system if first else habits.system_inside
    role = "system" if message.role == "system" and system else "user"
    chat: list[ChatMessage] = []
    for block in message.blocks:
        if block["type"] == "tool_result":
            shown = "\n".join(block["content"])
            chat.append({"role": "tool", "content": shown, "tool_call_id": block["tool_use_id"]} if habits.tools else _user(shown))
        elif block["type"] == "text" and chat and chat[-1]["role"] == role:
            chat[-1]["content"] += "\n" + block["text"]
        elif block["type"] == "text":
            chat.append({"role": role, "content": block["text"]})
    return chat


def _user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _append(chat: list[ChatMessage], turn: ChatMessage, joined: bool) -> None:
    if joined and chat and turn["role"] == "user" == chat[-1]["role"]:
        chat[-1] = _user(chat[-1]["content"] + "\n\n" + turn["content"])
    else:
        chat.append(turn)


def _assistant(message: Message, habits: Habits) -> list[ChatMessage]:
    calls = [block for block in message.blocks if block["type"] == "tool_use"]
    thoughts = "".join(block["thinking"] for block in message.blocks if block["type"] == "thinking")
    text = message.text
    if calls and not habits.calls:
        text, calls = "\n".join([*([text] if text else []), *map(_call_text, calls)]), []
    if calls and text and thoughts and habits.one_place:
        thoughts, text = f"{thoughts}\n{text}", ""
    turn: ChatMessage = {"role": "assistant", "content": text}
    if thoughts:
        turn[habits.thoughts] = thoughts
    if not calls:
        return [turn]
    said = [{"id": c["id"], "type": "function", "function": _function(c, habits)} for c in calls]
    nothing = None if habits.no_content else ""
    if habits.bare_calls and text:
        return [turn, {"role": "assistant", "content": nothing, "tool_calls": said}]
    return [{**turn, "content": text or nothing, "tool_calls": said}]


def _function(call: Block, habits: Habits) -> dict[str, Any]:
    given = call["input"]
    return {"name": call["name"], "arguments": json.dumps(given, ensure_ascii=False) if habits.text_arguments else given}


def _call_text(call: Block) -> str:
    inner = json.dumps({"name": call["name"], "arguments": call["input"]}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{inner}\n{CALL_CLOSE}"


def _rename(chat: list[ChatMessage], ids: str) -> None:
    """Ids as the family knows them, in calls and results alike."""
    names: dict[str, str] = {}
    count = 0
    for turn in chat:
        for place, call in enumerate(turn.get("tool_calls", ())):
            number = count if ids == KIMI_IDS else place
            own = f"functions.{call['function']['name']}:{number}" if ids != SHORT_IDS else _short(call["id"])
            names[call["id"]] = call["id"] = own
            count += 1
        if turn["role"] == "tool":
            known = turn["tool_call_id"]
            turn["tool_call_id"] = names.get(known, _short(known) if ids == SHORT_IDS else known)


def _short(id: str) -> str:
    return blake3(id.encode()).hexdigest()[:_SHORT]
