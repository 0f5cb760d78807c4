"""Text-only recordings as token ids: by a model's own template and tokenizer, or as plain bytes where no model is named.

Neither are the tokens that were sampled. By a model they are what that model would be shown and would have to write (control tokens in
the text stay text); bytes are UTF-8, each turn between its role's name and a line feed, decodable by anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import orjson

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.template import TurnRenderer


class Texts(Protocol):
    """Turns -> ids. ValueError: a template refuses them."""

    @property
    def name(self) -> str:
        """What made the ids, for the provenance."""
        ...

    def root(self, messages: Sequence[Message]) -> list[list[int]]:
        """A prompt's first nodes, up to where the answer begins."""
        ...

    @property
    def looks_back(self) -> bool:
        """What stands `before` has to be told."""
        ...

    def delta(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[int]:
        """What comes behind an answer and its end, up to where the next begins; `before`: the conversation up to and with that answer."""
        ...

    def answer(self, message: Message, before: Sequence[Message] = ()) -> list[int]:
        """An answer with its end; `before`: the conversation up to it."""
        ...


class ModelTexts:
    """By the renderer of a model."""

    def __init__(self, renderer: TurnRenderer) -> None:
        self._renderer = renderer
        self.name = str(renderer.directory)

    def root(self, messages: Sequence[Message]) -> list[list[int]]:
        return self._renderer.split(self._renderer.root(Conversation(Head(), tuple(messages))))

    @property
    def looks_back(self) -> bool:
        return self._renderer.looks_back > 0

    def delta(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[int]:
        return self._renderer.delta(messages, True, before)

    def answer(self, message: Message, before: Sequence[Message] = ()) -> list[int]:
        return self._renderer.answer(message, before)


class ByteTexts:
    """UTF-8 bytes; a turn is `role\\n`, its texts, thoughts, calls and results as lines, and an empty line."""

    name = "utf-8 bytes"
    looks_back = False

    def root(self, messages: Sequence[Message]) -> list[list[int]]:
        return [self.delta(messages)]

    def delta(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[int]:
        return [byte for message in messages for byte in _plain(message)]

    def answer(self, message: Message, before: Sequence[Message] = ()) -> list[int]:
        return list(_plain(message))


def _plain(message: Message) -> bytes:
    lines = [message.role.encode()]
    for block in message.blocks:
        if block["type"] == "tool_use":
            lines.append(b"call " + orjson.dumps({"name": block["name"], "arguments": block["input"]}))
        elif block["type"] == "tool_result":
            lines.append(b"result " + "\n".join(block["content"]).encode(errors="replace"))
        else:
            lines.append(str(block[block["type"]]).encode(errors="replace"))
    return b"\n".join(lines) + b"\n\n"
