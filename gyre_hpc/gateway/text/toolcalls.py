"""From generated text to content blocks: Hermes-style tool calls and thoughts, as the text streams in.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call; `<think>...</think>` at the very start is a thought. The parser is
strict: what is not exactly a JSON object with a string `name` and an object `arguments` is delivered as the text it is, and so is a
call that was never closed, or is nested deeper than clients read: the policy sees (and is trained on) what it really wrote. Invariants:
- streaming and whole parsing give the same blocks, however the text is cut;
- tool ids depend only on the call's id and the place in the turn, so a replay gives the same ids;
- white space at the end of a text block, and so a blank block, is not delivered (harnesses drop it, see canonical.py); other text verbatim.
The tags are those of vLLM's `hermes` parser; this one is ours because it streams, is strict, and needs no import of vLLM (4 s, 400 MB).
Other formats: library.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from gyre_hpc.gateway.dialects.canonical import Block
from gyre_hpc.gateway.text.thoughts import Thoughts, hold_back

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
DEEPEST = 100
"""Levels of objects and lists in arguments: clients can't read any number, and what we write JSON with ends at 254."""


@dataclass(frozen=True)
class TextPiece:
    """More text of the current (or a new) text block."""

    text: str


@dataclass(frozen=True)
class ThinkingPiece:
    """More text of the thinking block."""

    text: str


@dataclass(frozen=True)
class ToolPiece:
    """One whole tool call."""

    id: str
    name: str
    input: dict[str, Any]


Piece = TextPiece | ThinkingPiece | ToolPiece


class BlockText:
    """Text of a block as it is delivered: blanks wait until something visible follows them in the same block."""

    def __init__(self) -> None:
        self._blank = ""

    def feed(self, text: str) -> Iterator[TextPiece]:
        """More text of the block."""
        text = self._blank + text
        visible = text.rstrip()
        self._blank = text[len(visible) :]
        if visible:
            yield TextPiece(visible)

    def end(self) -> None:
        """The block is over; blanks at its end are not delivered."""
        self._blank = ""


class PieceParser(Protocol):
    """Feed sampled text, get pieces."""

    def feed(self, text: str) -> list[Piece]:
        """What can be told for certain after this text."""
        ...

    def finish(self, cut: bool) -> list[Piece]:
        """The rest, once the text is over. `cut`: it ended at a limit of tokens, not because the policy was done."""
        ...


class ToolCallParser:
    """Hermes calls. `prefix` makes tool ids (`<prefix>_<n>`); `thinking`: the prompt already opened a thought; `thoughts`: look for one."""

    def __init__(self, prefix: str, thinking: bool = False, thoughts: bool = True) -> None:
        self._prefix = prefix
        self._thoughts = Thoughts(thinking, thoughts)
        self._text = BlockText()
        self._buffer = ""
        self._searched = 0
        """Characters of the buffer in which a call certainly does not end."""
        self._calls = 0
        self._inside = False

    def feed(self, text: str) -> list[Piece]:
        """What can be told for certain after this text."""
        return list(self._take(*self._thoughts.feed(text)))

    def finish(self, cut: bool = False) -> list[Piece]:
        """The rest, once the text is over. A call that was not closed is text, whatever ended it."""
        pieces = list(self._take(*self._thoughts.finish()))
        rest, self._buffer = self._buffer, ""
        return [*pieces, *self._text.feed(CALL_OPEN + rest if self._inside else rest)]

    def _take(self, thought: str, text: str) -> Iterator[Piece]:
        if thought:
            yield ThinkingPiece(thought)
        self._buffer += text
        while True:
            before = (self._inside, len(self._buffer))
            yield from self._call() if self._inside else self._plain()
            if (self._inside, len(self._buffer)) == before:
                return

    def _plain(self) -> Iterator[Piece]:
        text, opened, rest = self._buffer.partition(CALL_OPEN)
        if opened:
            self._buffer, self._inside = rest, True
        else:
            text, self._buffer = hold_back(self._buffer, CALL_OPEN)
        yield from self._text.feed(text)

    def _call(self) -> Iterator[Piece]:
        end = self._buffer.find(CALL_CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(CALL_CLOSE) + 1)
            return
        inner, self._buffer = self._buffer[:end], self._buffer[end + len(CALL_CLOSE) :]
        self._inside, self._searched = False, 0
        call = parse_call(inner)
        if call is None:
            yield from self._text.feed(CALL_OPEN + inner + CALL_CLOSE)
            return
        self._text.end()
        yield ToolPiece(f"{self._prefix}_{self._calls}", *call)
        self._calls += 1


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """What stands between the tags -> (name, arguments), or None when it is not exactly a call."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) and shallow(arguments) else None


def shallow(value: Any, levels: int = DEEPEST) -> bool:
    """Whether a JSON value has at most so many levels."""
    if isinstance(value, dict | list):
        return levels > 0 and all(shallow(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))
    return True


def blocks_of(pieces: Iterable[Piece]) -> tuple[Block, ...]:
    """Pieces joined into content blocks, as a harness that collected the stream has them."""
    blocks: list[Block] = []
    for piece in pieces:
        if isinstance(piece, ToolPiece):
            blocks.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": piece.input})
            continue
        kind = "text" if isinstance(piece, TextPiece) else "thinking"
        if blocks and blocks[-1]["type"] == kind:
            blocks[-1][kind] += piece.text
        else:
            blocks.append({"type": kind, kind: piece.text})
    return tuple(blocks)
