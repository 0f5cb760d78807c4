"""Prompts as token ids: the model's own chat template, rendered once per turn and never over what is already known.

A conversation is root + (sampled turn + delta)*: the root is system, tools and the first messages; a delta is what a harness added after
a turn that the policy sampled. Invariants:
- sampled tokens are kept as drawn: a delta begins where they end (with the template's end of turn when the turn was cut short, as
  context, so that the policy is never trained on a token it did not draw);
- root + sampled + delta is, token by token, what the template makes of the whole conversation. That holds only for templates that are
  *append-only*; it is checked when the renderer is built (probes.py), on conversations with system prompt, tools, calls, their results and
  plain turns, and a template that is not is refused with its name (verl #6719 is what happens otherwise);
- control tokens in the text of tools, users and system prompts are encoded as text (guard.py): structure is the template's alone;
- a thought that the policy sampled stays in the context, also where the template would drop it from earlier turns; so does the token with
  which it ended its turn, also where a history has another there (harmony).
What a template can't read is said as its family would (chat.py); how a delta is found: writer.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, Message
from gyre_hpc.gateway.text.decoding import Decoder, decoders
from gyre_hpc.gateway.text.encoding import Encoder
from gyre_hpc.gateway.text.files import load_specials, load_stop_ids, load_template, load_tokenizer
from gyre_hpc.gateway.text.guard import TokenGuard
from gyre_hpc.gateway.text.habits import find_habits, find_inside, says, shows
from gyre_hpc.gateway.text.probes import NotAppendOnly, fitted
from gyre_hpc.gateway.text.thoughts import THINK_CLOSE, THINK_OPEN
from gyre_hpc.gateway.text.writer import BARE, MARK, TemplateWriter, marked, skeleton

log = logging.getLogger(__name__)
_REMEDY = (
    "put a template that is append-only (each message's text the same whatever follows it) into chat_template.jinja beside the tokenizer; "
    "docs/gateway.md, Chat templates, says where to find one"
)


class TurnRenderer:
    """Renders for the tokenizer and template of one Hugging Face directory.

    `stop_ids`: tokens that end a turn; `turn_end`: the one that the template writes before a question; `opens_thought`: the prompt ends
    inside a thought. Raises ConfigError when the directory has no usable template.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = load_tokenizer(directory)
        template, specials = load_template(directory), load_specials(directory)
        self._guard = TokenGuard(self.tokenizer, template)
        self._encoder = Encoder(self.tokenizer)
        self.stop_ids = load_stop_ids(directory, self.tokenizer, specials.get("eos_token", ""))
        self._decoders = decoders(self.tokenizer, self.stop_ids)
        self._writer, self._other_end = self._fitted(template, specials)
        self.turn_end = self._encode(self._writer.after([says("b")], [says("a"), marked(())]))[0]
        self.opens_thought = self._writer.root(BARE, [says("a")]).rstrip().endswith(THINK_OPEN)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.tokenizer.get_vocab_size())

    @property
    def looks_back(self) -> int:
        """How much of what stands before new messages `delta` and `behind` have to be told: 0 nothing, 1 the last turn, 2 all turns."""
        return self._writer.habits.looks_back

    def root(self, conversation: Conversation) -> list[int]:
        """Token ids of a whole prompt of which nothing is known yet, up to where the policy writes. Raises ValueError (template)."""
        if not self._guard.seen(conversation.head, conversation.messages):
            return self._encode(self._writer.root(conversation.head, conversation.messages))
        masked, base = self._guard.masked(conversation)
        return self._guard.encode(self._writer.root(masked.head, masked.messages), base)

    def delta(self, messages: Sequence[Message], closed: bool, before: Sequence[Message] = ()) -> list[int]:
        """Token ids of new messages behind a sampled turn, up to where the policy writes.

        closed: the sampled tokens end with the turn's end; otherwise the ids begin with it. before: the conversation up to and with that
        turn, for a template that looks back. Raises ValueError (template).
        """
        context = skeleton(before[-1:] if self._writer.habits.looks_back == 1 else before) if self.looks_back else []
        if not self._guard.seen(None, [*context, *messages]):
            ids = self._encode(self._writer.after(messages, context))
        else:
            masked, base = self._guard.masked(Conversation(Head(), (*context, *messages)))
            whole, at = masked.messages, len(context)
            ids = self._guard.encode(self._writer.after(whole[at:], whole[:at]), base)
        return ids[1:] if closed else ids

    def behind(self, messages: Sequence[Message], last: int, before: Sequence[Message] = ()) -> list[int]:
        """The same behind a turn that was sampled up to the token `last`: what closes the turn is written only where it was not drawn.

        Which token that is may depend on what follows (GLM: the next role's own); a history may have another than is drawn (harmony).
        """
        ids = self.delta(messages, False, before)
        drawn = ids[:1] == [last] or (ids[:1] == [self._other_end] and last in self.stop_ids)
        return ids[1:] if drawn else ids

    def answer(self, message: Message, before: Sequence[Message] = ()) -> list[int]:
        """Token ids of an answer as the template writes it, its end included: for answers whose tokens were not recorded.

        before: the conversation up to it, for a template that looks back. Raises ValueError: the template writes a turn in several ways.
        """
        context = skeleton(before) if self.looks_back else []
        masked, base = self._guard.masked(Conversation(Head(), (*context, message)))
        *context, message = masked.messages
        said, exact = self._writer.answer(message, context)
        if not exact and self._writer.root(BARE, [says("a")]).endswith(THINK_CLOSE):  # asked for behind that, as where thinking is off
            said = said.removeprefix(THINK_CLOSE)
        end = self._writer.after([shows(*message.tool_ids) if message.tool_ids else says("b")], [*context, message])
        return [*self._guard.encode(said, base), self._encode(end)[0]]

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

    # -- what is checked once ---------------------------------------------------------------------------------------------------
    def _fitted(self, template: str, specials: dict[str, str]) -> tuple[TemplateWriter, int]:
        """The writer that passed, and the token with which a history ends a turn where another was drawn, or -1."""
        added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.content.strip()]
        stops = tuple(str(self.tokenizer.id_to_token(i)) for i in self.stop_ids if self.tokenizer.id_to_token(i))
        writer = find_habits(TemplateWriter(template, specials, stops))
        other = _other_end(writer, added)
        if other:
            log.warning("the chat template ends earlier answers with %s, which is never drawn: the end that the policy drew stays", other)
            writer = TemplateWriter(template, specials, (*stops, other), writer.habits)
        try:
            fit = fitted(find_inside(writer), self._encode)
        except NotAppendOnly as error:
            why = f"{error} (stop tokens: {', '.join(stops)})"
            raise ConfigError(f"chat template of {self.directory} can't be used: {why}", _REMEDY) from None
        return fit, next((i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.content == other), -1)


def _other_end(writer: TemplateWriter, added: Sequence[str]) -> str:
    """The token that ends an answer in a history, where one that ends the conversation ends with a stop token (harmony); "" for none."""
    try:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        last = writer.render(chat, prompt=False).partition(MARK)[2]
        behind = writer.render([*chat, {"role": "user", "content": MARK}]).split(MARK)[1]
    except (ValueError, IndexError):
        return ""
    if not last.startswith(writer.ends) or any(end in behind for end in writer.ends):
        return ""
    return max((token for token in added if behind.startswith(token)), key=len, default="")
