"""Prompts as token ids: the model's own chat template, rendered once per turn and never over what is already known.

A conversation is root + (sampled turn + delta)*: the root is system, tools and the first messages; a delta is what a harness added after
a turn that the policy sampled. Invariants:
- sampled tokens are kept as drawn: a delta begins where they end (with the template's end of turn when the turn was cut short, as
  context, so that the policy is never trained on a token it did not draw);
- root + sampled + delta is, token by token, what the template makes of the whole conversation. That holds only for templates that are
  *append-only*; it is checked when the renderer is built, on probes with system prompt, tools, tool results and plain turns, and a
  template that is not is refused with its name (verl #6719 is what happens otherwise);
- control tokens in the text of tools, users and system prompts are encoded as text (guard.py): structure is the template's alone;
- a thought that the policy sampled stays in the context, also where the template would drop it from earlier turns.
A delta is found by rendering it behind a stand-in turn with a mark as its text, and taking what follows the mark where it comes first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.decoding import Decoder, decoders
from gyre_hpc.gateway.text.encoding import Encoder
from gyre_hpc.gateway.text.guard import TokenGuard
from gyre_hpc.gateway.text.thoughts import THINK_CLOSE, THINK_OPEN

log = logging.getLogger(__name__)
_MARK = "gyre5f3a9c"
_SHOWN = "gyre7d1b42"
"""The name of the probes' tool, and what it shows."""
_REMEDY = (
    "use a model whose template is append-only (Qwen-like ChatML), or put such a template into chat_template.jinja beside the tokenizer"
)

ChatMessage = dict[str, Any]


class TurnRenderer:
    """Renders for the tokenizer and template of one Hugging Face directory.

    `stop_ids`: tokens that end a turn; `turn_end`: the one that the template writes; `opens_thought`: the prompt ends inside a thought.
    Raises ConfigError when the directory has no usable template.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = _load_tokenizer(directory)
        settings = _read_json(directory / "tokenizer_config.json")
        self._template = _load_template(directory, settings)
        self._specials = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)}
        self._guard = TokenGuard(self.tokenizer, self._template)
        self._encoder = Encoder(self.tokenizer)
        self._no_tools: list[dict[str, Any]] | None = None
        self._mid_system = True
        self._arguments_as_text = False
        self._no_tools = self._find_no_tools()
        self.stop_ids = self._find_stop_ids()
        self._decoders = decoders(self.tokenizer, self.stop_ids)
        self.turn_end = self._find_turn_end()
        self._mid_system = self._accepts_mid_system()
        self._check_append_only()
        self.opens_thought = self._render([{"role": "user", "content": "a"}], None).rstrip().endswith(THINK_OPEN)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.tokenizer.get_vocab_size())

    def root(self, conversation: Conversation) -> list[int]:
        """Token ids of a whole prompt of which nothing is known yet, up to where the policy writes. Raises ValueError (template)."""
        if not self._guard.seen(conversation.head, conversation.messages):
            return self._encode(self._render(self._with_head(conversation.head, conversation.messages), conversation.head))
        masked, base = self._guard.masked(conversation)
        return self._guard.encode(self._render(self._with_head(masked.head, masked.messages), masked.head), base)

    def delta(self, messages: Sequence[Message], closed: bool) -> list[int]:
        """Token ids of new messages behind a sampled turn, up to where the policy writes.

        closed: the sampled tokens end with `turn_end`; otherwise the ids begin with it. Raises ValueError (template).
        """
        if not self._guard.seen(None, messages):
            ids = self._encode(self._after_mark(self._chat(messages, first=False)))
        else:
            masked, base = self._guard.masked(Conversation(Head(), tuple(messages)))
            ids = self._guard.encode(self._after_mark(self._chat(masked.messages, first=False)), base)
        return ids[1:] if closed else ids

    def behind(self, messages: Sequence[Message], last: int) -> list[int]:
        """The same behind a turn that was sampled up to the token `last`: what closes the turn is written only where it was not drawn.

        Which token that is may depend on what follows (GLM: the next role's own).
        """
        ids = self.delta(messages, closed=False)
        return ids[1:] if ids[:1] == [last] else ids

    def answer(self, message: Message) -> list[int]:
        """Token ids of an answer as the template writes it, its end included: for answers whose tokens were not recorded.

        Raises ValueError: the template writes a turn in more than one way.
        """
        masked, base = self._guard.masked(Conversation(Head(), (message,)))
        before: ChatMessage = {"role": "user", "content": "a"}
        after: ChatMessage = {"role": "user", "content": "b"}
        if message.tool_ids:
            after = {"role": "tool", "content": "b", "tool_call_id": message.tool_ids[0]}
        asked, behind = self._render([before], None), self._after_mark([after])
        whole = self._render([before, *self._chat(masked.messages, first=False), after], None)
        opened = asked if whole.startswith(asked) else _thoughtless(asked)
        if not (whole.startswith(opened) and whole.endswith(behind)):
            raise ValueError("the chat template writes an answer otherwise than it asks for one")
        said = whole[len(opened) : len(whole) - len(behind)]
        if opened != asked and asked.endswith(THINK_CLOSE):  # it was asked for behind that already, as where thinking is off
            said = said.removeprefix(THINK_CLOSE)
        return [*self._guard.encode(said, base), self._encode(behind)[0]]

    def split(self, root: Sequence[int]) -> list[list[int]]:
        """A root cut behind its first end of turn: the system prompt and the tools (shared by many executions), and the rest."""
        try:
            cut = list(root).index(self.turn_end) + 1
        except ValueError:
            return [list(root)]
        return [part for part in (list(root[:cut]), list(root[cut:])) if part]

    def text(self, tokens: Sequence[int]) -> str:
        """Sampled tokens as text, without the token that ended the turn."""
        return str(self.tokenizer.decode(self.spoken(tokens), skip_special_tokens=False))

    def shown(self, tokens: Sequence[int]) -> str:
        """Any tokens as text, control tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def spoken(self, tokens: Sequence[int]) -> list[int]:
        """Sampled tokens without the one that ended the turn."""
        return list(tokens[:-1]) if len(tokens) and tokens[-1] in self.stop_ids else list(tokens)

    def decoder(self) -> Decoder:
        """For the tokens of one turn as they come."""
        return self._decoders()

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    def _render(self, chat: list[ChatMessage], head: Head | None) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = [_tool_schema(tool) for tool in head.tools] if head and head.tools else self._no_tools
        options: dict[str, Any] = {"tools": tools, "chat_template": self._template, "add_generation_prompt": True, **self._specials}
        try:
            rendered: Any = render_jinja_template(conversations=[chat], **options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # whatever a template may stumble over
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return str(rendered[0][0])

    def _after_mark(self, chat: list[ChatMessage]) -> str:
        """What the template writes behind a turn whose text is the mark; it begins with the end of that turn."""
        text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}, *chat], None)
        _, marked, after = text.partition(_MARK)  # the first: `chat` may say it, too, where an agent reads this file
        if not marked:
            raise ValueError("it is not append-only: adding a turn takes away the text of the one before")
        return after

    def _with_head(self, head: Head, messages: Sequence[Message]) -> list[ChatMessage]:
        system = [{"role": "system", "content": head.system}] if head.system else []
        return [*system, *self._chat(messages, first=not system)]

    def _chat(self, messages: Sequence[Message], first: bool) -> list[ChatMessage]:
        chat: list[ChatMessage] = []
        for message in messages:
            chat.extend(to_chat(message, self._mid_system or (first and not chat)))
        if self._arguments_as_text:
            for function in (call["function"] for turn in chat for call in turn.get("tool_calls", ())):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return chat

    # -- what is checked once ---------------------------------------------------------------------------------------------------
    def _find_stop_ids(self) -> tuple[int, ...]:
        generation = _read_json(self.directory / "generation_config.json").get("eos_token_id")
        model = _read_json(self.directory / "config.json").get("eos_token_id")
        ids = [*_as_list(generation), *_as_list(model)]
        eos = self.tokenizer.token_to_id(self._specials.get("eos_token", ""))
        ids += [eos] if eos is not None else []
        if not ids:
            raise ConfigError(f"{self.directory} names no end-of-turn token", "set eos_token_id in generation_config.json")
        return tuple(dict.fromkeys(int(i) for i in ids))

    def _find_no_tools(self) -> list[dict[str, Any]] | None:
        """What the template wants where there are no tools: nothing, or (Hermes) an empty list."""
        for self._no_tools in (None, []):
            with contextlib.suppress(ValueError):
                self._render([{"role": "user", "content": "a"}], None)
                return self._no_tools
        return None

    def _find_turn_end(self) -> int:
        try:
            ids = self._encode(self._after_mark([{"role": "user", "content": "b"}]))
        except ValueError as error:
            raise self._refused(str(error)) from None
        if not ids or ids[0] not in self.stop_ids:
            found = self.tokenizer.id_to_token(ids[0]) if ids else "nothing"
            stops = ", ".join(str(self.tokenizer.id_to_token(i)) for i in self.stop_ids)
            raise self._refused(f"an assistant turn is followed by {found!r}, which is no stop token ({stops})")
        return int(ids[0])

    def _accepts_mid_system(self) -> bool:
        try:
            return "bcd" in self._after_mark([{"role": "system", "content": "bcd"}, {"role": "user", "content": "e"}])
        except ValueError:
            return False

    def _check_append_only(self) -> None:
        tool = {"name": _SHOWN, "description": "d", "input_schema": {"type": "object", "properties": {}}}
        heads = (Head(), Head("sys"), Head("sys", (tool,)))
        result = Message("user", ({"type": "tool_result", "tool_use_id": "i", "content": [_SHOWN], "is_error": False},))
        plain = Message("user", ({"type": "text", "text": "next \n"},))
        start = Message("user", ({"type": "text", "text": " one\n"},))
        same = True
        try:
            for head in heads:
                for follow in ([plain], [result], [result, result, plain]):
                    self._check_probe(head, start, follow)
                same = self._check_second_answer(head, start, result, plain) and same
            self._check_results(heads[-1], start, [result, plain])
        except ValueError as error:
            raise self._refused(str(error)) from None
        if not same:
            log.warning(
                "the chat template of %s writes other blanks behind a tool's result once an answer follows: the policy is shown those that "
                "stand there when it answers; to have the same everywhere, %s",
                self.directory,
                _REMEDY,
            )
        if _SHOWN not in self._render(self._with_head(heads[-1], [start]), heads[-1]):
            log.warning("the chat template of %s does not tell the policy of its tools: a harness's prompt must do it", self.directory)

    def _check_results(self, head: Head, start: Message, follow: list[Message]) -> None:
        """What a tool shows is rendered, and behind a stand-in without calls as behind a call: a template may look for that.

        A template that can't write a call at all has none to look for.
        """
        behind = self._chat(follow, first=False)
        if _SHOWN not in self._after_mark(behind):
            raise ValueError("it leaves out what tools show")
        whole = self._behind_a_call(head, start, behind)
        if whole is None:
            log.warning(
                "the chat template of %s refuses a call with its result and a question behind it: a harness whose history has one that was "
                "not recorded here (an edit, a compaction) gets status 400",
                self.directory,
            )
        elif not whole.endswith(self._after_mark(behind)):
            raise ValueError("it is not append-only: tool results behind a call are written otherwise than behind a turn without one")

    def _behind_a_call(self, head: Head, start: Message, behind: list[ChatMessage]) -> str | None:
        """A whole prompt in which `behind` follows a call; None for a template that refuses that."""
        arguments: tuple[Any, ...] = ({}, "{}")  # some write the text that they are given
        for given in arguments:
            function = {"name": _SHOWN, "arguments": given}
            turn = {"role": "assistant", "content": _MARK, "tool_calls": [{"id": "i", "type": "function", "function": function}]}
            with contextlib.suppress(ValueError):
                whole = self._render([*self._with_head(head, [start]), turn, *behind], head)
                self._arguments_as_text = given == "{}"
                return whole
        return None

    def _check_second_answer(self, head: Head, start: Message, result: Message, plain: Message) -> bool:
        """Two answers, a tool's result between them: whether each part is as it is rendered when it is new, blanks included.

        Blanks alone (Hermes: a line's end behind a result that is not the last) are no reason to refuse: what is recorded is what was seen.
        """
        turn: ChatMessage = {"role": "assistant", "content": _MARK}
        told, asked = self._chat([result], first=False), self._chat([plain], first=False)
        first = self._with_head(head, [start])
        wanted = [_thoughtless(part) for part in (self._render(first, head), self._after_mark(told), self._after_mark(asked))]
        try:
            found = [_thoughtless(part) for part in self._render([*first, turn, *told, turn, *asked], head).split(_MARK)]
        except ValueError:  # two answers without a question between them (Ministral): the first must be a call
            whole = self._behind_a_call(head, start, [*told, turn, *asked])
            if whole is None:
                raise
            before, _, after = whole.rpartition(_MARK)
            before = _thoughtless(before)
            found = [before[: len(wanted[0])], before[len(before) - len(wanted[1]) :], _thoughtless(after)]
        if ["".join(part.split()) for part in found] != ["".join(part.split()) for part in wanted]:
            raise ValueError("it is not append-only: a second answer changes what was rendered before")
        return found == wanted

    def _check_probe(self, head: Head, start: Message, follow: list[Message]) -> None:
        turn: ChatMessage = {"role": "assistant", "content": _MARK}
        whole = self._render([*self._with_head(head, [start]), turn, *self._chat(follow, first=False)], head)
        root = self._render(self._with_head(head, [start]), head)
        delta = self._after_mark(self._chat(follow, first=False))
        before, _, after = whole.partition(_MARK)
        if _thoughtless(before) != _thoughtless(root) or after != delta:
            kind = "tool results" if follow[0].blocks[0]["type"] == "tool_result" else "a user turn"
            raise ValueError(f"it is not append-only: adding {kind} changes what was rendered before")
        if before == root and self._encode(root) + self._encode(_MARK) + self._encode(delta) != self._encode(whole):
            raise ValueError("its turns do not begin and end at token boundaries")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"chat template of {self.directory} can't be used: {why}", _REMEDY)


def _thoughtless(text: str) -> str:
    """Without an open or empty thought and blanks at the end, which thinking templates write in one place and leave out in the other.

    Nor with the end of a thought alone: GLM-4.7 asks with `<think>` and writes `</think>` before the text of earlier turns.
    """
    return re.sub(r"\s*(<think>\s*)?(</think>\s*)?$", "", text)


def to_chat(message: Message, system_allowed: bool) -> list[ChatMessage]:
    """One normalised turn as the messages that chat templates read: a turn's tool results become `tool` messages of their own."""
    if message.role == "assistant":
        return [_assistant(message)]
    role = "user" if message.role == "user" or not system_allowed else "system"
    chat: list[ChatMessage] = []
    for block in message.blocks:
        if block["type"] == "tool_result":
            chat.append({"role": "tool", "content": "\n".join(block["content"]), "tool_call_id": block["tool_use_id"]})
        elif block["type"] == "text" and chat and chat[-1]["role"] == role:
            chat[-1]["content"] += "\n" + block["text"]
        elif block["type"] == "text":
            chat.append({"role": role, "content": block["text"]})
    return chat


def _assistant(message: Message) -> ChatMessage:
    turn: ChatMessage = {"role": "assistant", "content": message.text}
    thoughts = "".join(block["thinking"] for block in message.blocks if block["type"] == "thinking")
    if thoughts:
        turn["reasoning_content"] = thoughts
    calls = [block for block in message.blocks if block["type"] == "tool_use"]
    if calls:
        turn["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["input"]}} for call in calls
        ]
    return turn


def _tool_schema(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}}


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    if not directory.is_dir():
        raise ConfigError(f"model.path: {directory} does not exist", "give a Hugging Face causal-LM directory")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {directory}: {error}", "put tokenizer.json there") from None
    backend: Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer of {directory} has no fast form", "convert it to tokenizer.json")
    return backend


def _load_template(directory: Path, settings: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{directory} has no chat template", "put chat_template.jinja beside the tokenizer")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text())
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
