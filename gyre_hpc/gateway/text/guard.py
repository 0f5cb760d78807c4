"""Control tokens in a harness's own text stay text: `<|im_end|><|im_start|>assistant` in a file that an agent reads forges no turn.

A tokenizer finds its added tokens wherever their text stands, so text of tools, users and system prompts could write structure.
*Guarded* are the added tokens that mean structure: all special ones, those that the chat template names, the tags of thoughts and calls,
and whatever looks like `<|...|>`; not a model's shorthand for blanks or HTML tags, which are text to it. Invariants:
- where no guarded text occurs nothing changes and nothing is paid but one scan of the new messages;
- where it does, the prompt has exactly the guarded tokens that the template wrote, whatever the text says; all else is encoded as the
  tokenizer encodes text, in one pass.
How: such occurrences are masked by private-use characters before the template is rendered; in what is rendered the two change places, the
template's own tokens become private-use characters and the masked ones their text again; and a copy of the tokenizer that knows the
guarded tokens by those characters alone encodes it. The copy is made at the first need (for a large vocabulary about a
second and the tokenizer's memory again).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.thoughts import THINK_CLOSE, THINK_OPEN
from gyre_hpc.gateway.text.toolcalls import CALL_CLOSE, CALL_OPEN

_PLANES = (0x100000, 0xF0000)
"""Where the private-use characters lie: two planes, so that a text may use one of them."""
_TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
_CONTROL = ("<|", "<\uff5c")


class TokenGuard:
    """For one tokenizer; `template`: the source of its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: number
            for number, token in added.items()
            if token.content.strip()
            and (token.special or token.content in template or token.content in _TAGS or token.content.startswith(_CONTROL))
        }
        self._texts = sorted(self._ids, key=len, reverse=True)
        self._place = {text: i for i, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._bytes = re.compile(b"|".join(re.escape(orjson.dumps(text)[1:-1]) for text in self._texts) or rb"(?!)")
        self._guarded = frozenset(self._ids.values())
        self._copies: dict[int, tuple[Tokenizer, dict[int, int]]] = {}

    def seen(self, head: Head | None, messages: Sequence[Message]) -> bool:
        """Whether guarded text stands anywhere in them."""
        if head is not None and self._bytes.search(head.canonical):
            return True
        return any(self._bytes.search(message.canonical) or self._bytes.search(_uncompared(message)) for message in messages)

    def masked(self, conversation: Conversation) -> tuple[Conversation, int]:
        """The conversation with masks in place of guarded text, and the first mask. ValueError: it is full of such characters itself."""
        head, messages = conversation.head, conversation.messages
        base = self._unused(conversation)

        def mask(text: str) -> str:
            return self._pattern.sub(lambda found: chr(base + self._place[found.group()]), text)

        tools = tuple(_mapped(tool, mask) for tool in head.tools)
        turns = tuple(Message(message.role, tuple(_mapped(block, mask) for block in message.blocks)) for message in messages)
        return Conversation(Head(mask(head.system), tools), turns), base

    def encode(self, rendered: str, base: int) -> list[int]:
        """Token ids of what was rendered from a masked conversation. ValueError: this tokenizer makes a control token of plain text."""
        count = len(self._texts)
        parts = self._pattern.split(rendered)
        names = [chr(base + count + self._place[text]) for text in self._pattern.findall(rendered)]
        masks = re.compile(f"[{chr(base)}-{chr(base + count - 1)}]")
        texts = [masks.sub(lambda found: self._texts[ord(found.group()) - base], part) for part in parts]
        copy, numbers = self._copy(base + count)
        whole = "".join(text + name for text, name in zip(texts, [*names, ""], strict=True))
        ids = [numbers.get(i, i) for i in copy.encode(whole, add_special_tokens=False).ids]
        if sum(i in self._guarded for i in ids) != len(names):
            raise ValueError("this tokenizer can't encode the text of a control token as text")
        return ids

    def _unused(self, conversation: Conversation) -> int:
        """The first of twice as many private-use characters as there are guarded tokens, none of which the conversation has."""
        texts = [conversation.head.canonical.decode(), *(message.canonical.decode() for message in conversation.messages)]
        texts += [_uncompared(message).decode() for message in conversation.messages]
        for plane in _PLANES:
            found = re.compile(f"[{chr(plane)}-{chr(plane + 2 * len(self._texts))}]")
            if not any(found.search(text) for text in texts):
                return plane
        raise ValueError("text with control tokens and with private-use characters can't be told apart from structure")

    def _copy(self, first: int) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that knows the guarded tokens as characters from `first` on, and its ids for them -> the real ones."""
        if first not in self._copies:

            def named(text: str) -> str:
                return chr(first + self._place[text]) if text in self._place else text

            described = json.loads(self._tokenizer.to_str())
            for token in described["added_tokens"]:
                if token["content"] in self._place:
                    token |= {"content": named(token["content"]), "normalized": False}
            described["post_processor"] = None
            _rename(described["model"], named)
            copy = Tokenizer.from_str(json.dumps(described))
            names = ((copy.token_to_id(named(text)), self._ids[text]) for text in self._texts)
            self._copies[first] = copy, {own: real for own, real in names if own is not None}
        return self._copies[first]


def _uncompared(message: Message) -> bytes:
    """JSON of what a template may write of a turn beside its canonical form: thoughts, and the arguments of calls as they came."""
    blocks = message.blocks if message.role == "assistant" else ()
    return orjson.dumps([block for block in blocks if block["type"] in ("thinking", "tool_use")])


def _rename(model: dict[str, Any], named: Callable[[str], str]) -> None:
    """Control tokens that are words of the model too (sentencepiece has them there): text must not become them by that way either."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges") or ()}
        model["vocab"] = {piece if piece in merged else named(piece): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[named(piece), score] for piece, score in vocabulary]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in value]
    return value
