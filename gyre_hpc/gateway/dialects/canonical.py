"""One canonical form of a conversation, so that a history is matched by meaning and never re-tokenised for a change of spelling.

A harness sends the whole history with every call and rarely the same bytes (design: harnesses.md, "What comes back"). Two requests mean
the same when their canonical forms are equal. The rules, each with its test in tests/gateway/dialects/test_canonical.py:
1. `content` as a string is one text block; `cache_control`, `citations`, signatures and unknown keys are dropped.
2. Blank text blocks are dropped; a message without blocks is no message.
3. Tool arguments are JSON values: key order, spelling of numbers (1000.0 is 1000; beyond 2**53 a double) and white space mean nothing;
   nor does what a harness's own types make of them: false or null beside nothing, a number or a truth beside its text, and blanks at the
   ends of lines. (Two turns that differ by no more than that still have different tool ids: nothing is taken for another's.)
4. Tool ids are kept: they tell apart calls that are otherwise equal. `is_error` defaults to false.
5. Inside an assistant turn text stands before tool calls (a harness moves it there); the order among each is kept.
6. Thinking is not compared: a harness may strip it. What the policy sampled is restored from the record, thoughts included.
7. An attribution line (`x-anthropic-billing-header: ...`) at the head of a text, which changes from call to call, is no part of it.
Identity: `Message.key` is blake3 of the canonical bytes, 16 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
from blake3 import blake3

from gyre_hpc.gateway.harnesses import GENERIC, Harness
from trees.matching import chain

Block = dict[str, Any]
"""A normalised block: {"type": "text", "text"} | {"type": "thinking", "thinking"} | {"type": "tool_use", "id", "name", "input"} |
{"type": "tool_result", "tool_use_id", "content": [str, ...], "is_error"}."""

KEY_BYTES = 16
_EXACT = 2**53
_TRUTHS = {"true": True, "false": False}
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")
_LONGEST_NUMBER = 24
_BLANKS = (
    " \t\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
"""White space of Python and of JavaScript, but for the line feed."""
_ENDS = tuple(_BLANKS)
_LINE_ENDS = tuple(f"{blank}\n" for blank in _BLANKS)
_ASCII_LINE_ENDS = tuple(end for end in _LINE_ENDS if end.isascii())
_ATTRIBUTION = "x-anthropic-billing-header:"
_THINKING = ("thinking", "redacted_thinking")
_SKIPPED = ("server_tool_use", "web_search_tool_result", "tool_reference")


class UnsupportedContent(ValueError):
    """A block that a text model can't read. The text is meant for the harness."""


@dataclass(frozen=True)
class Message:
    """One normalised turn. `role`: system | user | assistant."""

    role: str
    blocks: tuple[Block, ...]

    @cached_property
    def canonical(self) -> bytes:
        """The canonical bytes: sorted-key JSON."""
        return orjson.dumps([self.role, _compared(self.role, self.blocks)], option=orjson.OPT_SORT_KEYS)

    @cached_property
    def key(self) -> bytes:
        return blake3(self.canonical).digest(KEY_BYTES)

    @property
    def blank(self) -> bool:
        """Nothing of it is compared: a harness may leave such a turn out, or not."""
        return all(block["type"] == "thinking" for block in self.blocks)

    @property
    def text(self) -> str:
        """The text blocks, joined by line breaks."""
        return "\n".join(block["text"] for block in self.blocks if block["type"] == "text")

    @property
    def tool_ids(self) -> tuple[str, ...]:
        """Ids of the tool calls in this turn."""
        return tuple(block["id"] for block in self.blocks if block["type"] == "tool_use")


class Known(Message):
    """A turn that was read before, without its text: its role, its key, and whether it says anything."""

    def __init__(self, role: str, key: bytes, blank: bool) -> None:
        self.__dict__.update(role=role, key=key, silent=blank)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def blank(self) -> bool:
        return bool(self.__dict__["silent"])

    @property
    def blocks(self) -> tuple[Block, ...]:
        raise RuntimeError("the text of a known turn was asked for: take the whole conversation")


class Items(list[Any]):
    """The list of a body of which some was read before: `known` stand in front of these items (behind those of the system prompt)."""

    known: tuple[Known, ...] = ()


def known_of(items: Any) -> tuple[Message, ...]:
    """Turns that stand in front of these items of a body."""
    return items.known if isinstance(items, Items) else ()


@dataclass(frozen=True)
class Head:
    """What stands above the messages: the system prompt and the tools, each {"name", "description", "input_schema"}."""

    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @cached_property
    def canonical(self) -> bytes:
        return orjson.dumps([self.system, [canonical_value(tool) for tool in self.tools]], option=orjson.OPT_SORT_KEYS)

    @cached_property
    def key(self) -> bytes:
        return blake3(self.canonical).digest(KEY_BYTES)


HEADS = 64
_heads: dict[bytes, Head] = {}


def head_of(system: str, tools: tuple[dict[str, Any], ...]) -> Head:
    """A head; the same object for the same system prompt and tools, of the last that were asked for: their canonical form costs more."""
    digest = blake3(orjson.dumps([system, tools])).digest()
    head = _heads.pop(digest, None) or Head(system, tools)
    _heads[digest] = head
    if len(_heads) > HEADS:
        del _heads[next(iter(_heads))]
    return head


@dataclass(frozen=True)
class Conversation:
    """The canonical form of one request's prompt.

    `known`: the text of some of that many first messages is not here, but in `whole()`; `trail`: the first of `digests`, where they are
    known already.
    """

    head: Head
    messages: tuple[Message, ...] = field(default=())
    harness: Harness = GENERIC
    """Who says it: no part of its meaning."""
    known: int = field(default=0, compare=False)
    trail: tuple[bytes, ...] = field(default=(), compare=False)
    whole: Callable[[], Conversation] | None = field(default=None, compare=False)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """The digest of the boundary behind the head, and of that behind each message: a chain of their keys (trees.matching)."""
        digests = list(self.trail) or [chain(b"", self.head.key)]
        for message in self.messages[len(digests) - 1 :]:
            digests.append(chain(digests[-1], message.key))
        return tuple(digests)

    @property
    def key(self) -> bytes:
        """16 bytes that stand for the whole prompt."""
        return self.digests[-1]


def canonical_value(value: Any) -> Any:
    """A JSON value in which equal meaning is equal value (rule 3), as a JavaScript program would read and write it back."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): canonical_value(item) for key, item in value.items()}
    return [canonical_value(item) for item in value]


def canonical_arguments(value: Any) -> Any:
    """The arguments of a tool call, whatever a harness's own types make of them (rule 3)."""
    if isinstance(value, str):
        return _canonical_text(value)
    if isinstance(value, Mapping):
        items = ((str(key), canonical_arguments(item)) for key, item in value.items())
        return {key: item for key, item in items if item is not None and item is not False}
    if isinstance(value, list | tuple):
        return [canonical_arguments(item) for item in value]
    return canonical_value(value)


def _canonical_text(text: str) -> Any:
    if len(text) <= _LONGEST_NUMBER:
        if text in _TRUTHS:
            return _TRUTHS[text]
        if _NUMBER.fullmatch(text):
            return _number(float(text))
    if not text.endswith(_ENDS) and not _has_blank_ends(text):
        return text
    return "\n".join(line.rstrip(_BLANKS) for line in text.split("\n"))


def _has_blank_ends(text: str) -> bool:
    """Whether a line that is not the last ends with a blank."""
    if "\n" in text:
        for end in _ASCII_LINE_ENDS if text.isascii() else _LINE_ENDS:  # no generator: it would cost more than the search
            if end in text:
                return True
    return False


def normalise_system(system: Any) -> str:
    """`system` as a string or a list of text blocks -> one string. Raises UnsupportedContent."""
    parts = [system] if isinstance(system, str) else [_text_of(block, "system") for block in system or ()]
    return "\n\n".join(said for part in parts if (said := _unattributed(part)).strip())


def normalise_tools(tools: Iterable[Mapping[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    """Tool definitions with what a template reads, in the given order (a model sees the order)."""
    return tuple(
        {
            "name": str(tool.get("name", "")),
            "description": str(tool.get("description") or ""),
            "input_schema": tool.get("input_schema") or {"type": "object"},
        }
        for tool in tools or ()
    )


def normalise_message(role: str, content: Any) -> Message:
    """One message of a request, `content` being a string, a list of blocks or None. Raises UnsupportedContent."""
    raw = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    if not isinstance(raw, Sequence):
        raise UnsupportedContent(f"content of a {role} message must be a string or a list of blocks")
    blocks = [block for item in raw if (block := _block(item, role)) is not None]
    return Message(role, tuple(blocks))


def normalise_messages(messages: Iterable[Mapping[str, Any] | Message]) -> tuple[Message, ...]:
    """The messages of a request; those without any block are left out (rule 2), turns are themselves. Raises UnsupportedContent."""
    turns = (
        message if isinstance(message, Message) else normalise_message(str(message.get("role", "user")), message.get("content"))
        for message in messages
    )
    return tuple(turn for turn in turns if not turn.blank)


def _compared(role: str, blocks: Sequence[Block]) -> list[Block]:
    kept = [block for block in blocks if block["type"] != "thinking"]
    if role == "assistant":
        kept.sort(key=lambda block: block["type"] == "tool_use")
    return [{**block, "input": canonical_arguments(block["input"])} if block["type"] == "tool_use" else block for block in kept]


def _block(item: Any, role: str) -> Block | None:
    if isinstance(item, str):
        item = {"type": "text", "text": item}
    if not isinstance(item, Mapping):
        raise UnsupportedContent(f"a block of a {role} message must be an object")
    kind = item.get("type", "text")
    if kind == "text":
        text = _unattributed(str(item.get("text") or ""))
        return {"type": "text", "text": text} if text.strip() else None
    if kind in _THINKING:
        return {"type": "thinking", "thinking": str(item.get("thinking") or "")}
    if kind == "tool_use":
        return {"type": "tool_use", "id": str(item.get("id", "")), "name": str(item.get("name", "")), "input": item.get("input") or {}}
    if kind == "tool_result":
        return _tool_result(item)
    if kind in _SKIPPED:
        return None
    raise UnsupportedContent(f"{kind} blocks are not supported: this model reads text only")


def _unattributed(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text


def _tool_result(item: Mapping[str, Any]) -> Block:
    content = item.get("content") or ()
    if not isinstance(content, str | list | tuple):
        raise UnsupportedContent("content of a tool_result must be a string or a list of blocks")
    parts = [content] if isinstance(content, str) else [_text_of(part, "tool_result", told=True) for part in content]
    return {
        "type": "tool_result",
        "tool_use_id": str(item.get("tool_use_id", "")),
        "content": [part for part in parts if part.strip()],
        "is_error": bool(item.get("is_error", False)),
    }


def left_out(kind: str) -> str:
    """What stands for an image or a document in the result of a tool: a refusal would end the harness, which did not choose to look."""
    return f"[{kind} left out: this model reads text only]"


def _text_of(block: Any, where: str, told: bool = False) -> str:
    """`told`: what can't be read is told as left out, instead of being refused."""
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and block.get("type", "text") == "text":
        return str(block.get("text") or "")
    if isinstance(block, Mapping) and block.get("type") in _SKIPPED:
        return ""
    if told and isinstance(block, Mapping):
        return left_out(str(block.get("type")))
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise UnsupportedContent(f"{kind} blocks in {where} are not supported: this model reads text only")


def _number(value: int | float) -> int | float:
    try:
        as_float = float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    if as_float.is_integer() and abs(as_float) <= _EXACT:
        return int(as_float)
    return as_float
