"""From generated text to content blocks: Hermes-style tool calls and thoughts, as the text streams in.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call; `<think>...</think>` at the very start is a thought. The parser is
strict: what is not exactly a JSON object with a string `name` and an object `arguments` is delivered as the text it is, and so is a
call that was never closed: the policy sees (and is trained on) what it really wrote. Invariants:
- streaming and whole parsing give the same blocks, however the text is cut;
- tool ids depend only on the call's id and the place in the turn, so a replay gives the same ids;
- white space at the end of a text block, and so a blank block, is not delivered (harnesses drop it, see canonical.py); other text verbatim.
The tags are those of vLLM's `hermes` parser, which can't be imported without the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from gyre_hpc.gateway.canonical import Block

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


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


class ToolCallParser:
    """Feed text, get pieces. `prefix` makes tool ids (`<prefix>_<n>`); `thinking`: the prompt already opened a thought."""

    def __init__(self, prefix: str, thinking: bool = False) -> None:
        self._prefix = prefix
        self._buffer = ""
        self._blank = ""
        self._calls = 0
        self._state = "think" if thinking else "start"

    def feed(self, text: str) -> list[Piece]:
        """What can be told for certain after this text."""
        self._buffer += text
        return list(self._advance())

    def finish(self) -> list[Piece]:
        """The rest, once the text is over."""
        rest, self._buffer = self._buffer, ""
        if self._state == "think":
            return [ThinkingPiece(rest)] if rest else []
        return list(self._text(CALL_OPEN + rest if self._state == "call" else rest))

    def _advance(self) -> Iterator[Piece]:
        while True:
            before = (self._state, len(self._buffer))
            yield from self._step()
            if (self._state, len(self._buffer)) == before:
                return

    def _step(self) -> Iterator[Piece]:
        if self._state == "start":
            self._start()
        elif self._state == "think":
            yield from self._think()
        elif self._state == "text":
            yield from self._plain()
        else:
            yield from self._call()

    def _start(self) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK_OPEN):
            self._buffer, self._state = stripped[len(THINK_OPEN) :], "think"
        elif stripped and not THINK_OPEN.startswith(stripped):
            self._state = "text"

    def _think(self) -> Iterator[Piece]:
        thought, close, rest = self._buffer.partition(THINK_CLOSE)
        if close:
            self._buffer, self._state = rest, "text"
        else:
            thought, self._buffer = _hold_back(self._buffer, THINK_CLOSE)
        if thought:
            yield ThinkingPiece(thought)

    def _plain(self) -> Iterator[Piece]:
        text, opened, rest = self._buffer.partition(CALL_OPEN)
        if opened:
            self._buffer, self._state = rest, "call"
        else:
            text, self._buffer = _hold_back(self._buffer, CALL_OPEN)
        yield from self._text(text)

    def _call(self) -> Iterator[Piece]:
        inner, closed, rest = self._buffer.partition(CALL_CLOSE)
        if not closed:
            return
        self._buffer, self._state = rest, "text"
        call = parse_call(inner)
        if call is None:
            yield from self._text(CALL_OPEN + inner + CALL_CLOSE)
            return
        self._blank = ""
        yield ToolPiece(f"{self._prefix}_{self._calls}", *call)
        self._calls += 1

    def _text(self, text: str) -> Iterator[Piece]:
        """Blank text waits until something visible follows it in the same block."""
        text = self._blank + text
        visible = text.rstrip()
        self._blank = text[len(visible) :]
        if visible:
            yield TextPiece(visible)


def parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """What stands between the tags -> (name, arguments), or None when it is not exactly a call."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


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


def _hold_back(text: str, tag: str) -> tuple[str, str]:
    """Split before the longest end of `text` that may be the beginning of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return text[:-size], text[-size:]
    return text, ""
