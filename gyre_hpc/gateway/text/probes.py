"""Whether new messages, rendered by themselves, are what a template writes for them in a whole conversation: looked at once, at the load.

Probes are conversations with every kind of turn, each rendered whole and by parts. What a template looks back at for new messages is found
by the same comparison: the least that gives the same (0: nothing, 1: the calls before them, 2: the whole conversation). Invariant: a
template passes only if every probe that it takes is the same, and it takes one with an answer, and one with what a tool shows. Differences
that count for none: a thought that is open or empty where one is asked for and left out of the history (what the policy sampled stays),
and blanks (told in the log: what is recorded is what was seen).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from gyre_hpc.gateway.dialects.canonical import Head, Message
from gyre_hpc.gateway.text.chat import KIMI_IDS, split_calls
from gyre_hpc.gateway.text.habits import SHOWN, calls, says, shows
from gyre_hpc.gateway.text.writer import BARE, MARK, THOUGHTS, TemplateWriter, marked, thoughtless

log = logging.getLogger(__name__)
_TOOL = {"name": SHOWN, "description": "d", "input_schema": {"type": "object", "properties": {}}}
HEADS = (BARE, Head("sys"), Head("sys", (_TOOL,)))
_ASKED, _AGAIN, _SAID = says(" one\n"), says("next \n"), marked(())
_PLAIN = ((_ASKED, _SAID, _AGAIN), (_ASKED, _SAID, _AGAIN, _SAID, _AGAIN), (_ASKED, _SAID, Message("system", _AGAIN.blocks), _AGAIN))
_CALLS = (
    (_ASKED, calls("gyre_i"), shows("gyre_i")),
    (_ASKED, calls("gyre_i"), shows("gyre_i"), _SAID, _AGAIN),
    (_ASKED, calls("gyre_i", "gyre_j"), shows("gyre_i", "gyre_j")),
    (_ASKED, calls("gyre_i"), Message("user", (*shows("gyre_i").blocks, *_AGAIN.blocks))),
    (
        _ASKED,
        calls("gyre_i", "gyre_j"),
        shows("gyre_i", "gyre_j"),
        calls("gyre_k"),
        shows("gyre_k"),
        _SAID,
        _AGAIN,
        calls("gyre_l"),
        shows("gyre_l"),
        _SAID,
        _AGAIN,
    ),
)
_UNCALLED = (
    (_ASKED, _SAID, shows("gyre_i")),
    (_ASKED, _SAID, shows("gyre_i", "gyre_j"), _AGAIN),
    (_ASKED, _SAID, shows("gyre_i"), _SAID, _AGAIN),
)
"""Results behind a turn without a call: only a template that doesn't look back is asked for them."""


class NotAppendOnly(ValueError):
    """Why a template can't be used."""


def fitted(writer: TemplateWriter, encode: Callable[[str], list[int]]) -> TemplateWriter:
    """`writer` with the least look back by which every probe is the same, and what it saw of ends. Raises NotAppendOnly.

    encode: text -> ids.
    """
    habits, refused = writer.habits, None
    for given in (habits, replace(habits, bare_calls=True, no_content=True), replace(habits, calls=False)):
        for looks_back, in_parts in ((0, False), (1, False), (2, False), (0, True))[2 if given.ids == KIMI_IDS else 0 :]:
            tried = replace(writer, habits=replace(given, looks_back=looks_back, in_parts=in_parts))
            try:
                return _Probe(tried, encode).run()
            except NotAppendOnly as error:
                refused = refused or error
    raise refused or NotAppendOnly("nothing was tried")


class _Probe:
    def __init__(self, writer: TemplateWriter, encode: Callable[[str], list[int]]) -> None:
        self._writer, self._encode = writer, encode
        self._closings: set[str] = set()
        self._openings: set[str] = set()
        self._same = True
        self._last = ""
        """The last refusal of a whole probe."""

    def run(self) -> TemplateWriter:
        for head in HEADS:
            plain = [self._look(head, probe) for probe in _PLAIN]
            called = [(self._look(head, probe), _answers(probe)) for probe in _CALLS]
            if self._writer.habits.looks_back == 0:
                called += [(self._look(head, probe), _answers(probe)) for probe in _UNCALLED]
            if not (any(plain) and any(taken and len(answers) > 1 for taken, answers in called)):
                raise NotAppendOnly(self._last)
        self._tell()
        return replace(self._writer, closings=frozenset(self._closings))

    def _look(self, head: Head, probe: Sequence[Message]) -> bool:
        """Whether the template takes this conversation at once. Raises NotAppendOnly: and it is not that of the parts."""
        writer = self._writer
        if writer.habits.single_calls:
            probe = [message if len(message.tool_ids) != 1 else _marked(message) for message in split_calls(probe)]
        answers = _answers(probe)
        try:
            whole = writer.whole(head, probe)
        except ValueError as error:
            self._last = str(error)
            return False
        if writer.habits.in_parts and len(answers) > 2:
            return True
        parts = whole.split(MARK)
        if len(parts) != len(answers) + 1:
            raise NotAppendOnly("it is not append-only: adding a turn takes away the text of the one before")
        try:
            asked = writer.root(head, probe[: answers[0]])
            follows = [writer.after(probe[a + 1 : b], probe[: a + 1]) for a, b in zip(answers, [*answers[1:], len(probe)], strict=True)]
        except ValueError as error:
            raise NotAppendOnly(str(error)) from None
        self._check_opening(self._behind(parts[0], asked, "adding a turn changes"), probe[answers[0]])
        for number, (part, follow) in enumerate(zip(parts[1:], follows, strict=True)):
            place = answers[number]
            closing, rest = self._cut(part)
            shown = probe[place + 1].blocks[0]["type"] == "tool_result"
            if shown and SHOWN not in rest:
                raise NotAppendOnly("it leaves out what tools show")
            what = (
                ("adding tool results changes" if shown else "adding a user turn changes")
                if len(answers) == 1
                else "a second answer changes"
            )
            if number + 1 < len(follows):
                self._check_opening(self._behind(rest, follow, what), probe[answers[number + 1]])
            else:
                self._check_last(rest, follow, what)
            self._closings.add(writer.bare(closing, probe[: place + 1]))
        if len(answers) == 1 and whole == asked + MARK + parts[1]:
            self._check_tokens(asked, MARK + closing, follow, whole)
        return True

    def _cut(self, part: str) -> tuple[str, str]:
        try:
            closing, rest = self._writer.cut(part)
        except ValueError:
            closing, rest = part, ""
        if not rest or SHOWN in closing or "next" in closing:
            ids = self._encode(part)[:1]
            raise NotAppendOnly(f"an assistant turn is followed by {part[:20] if ids else 'nothing'!r}, and no stop token ends it")
        return closing, rest

    def _behind(self, text: str, head: str, what: str) -> str:
        """What stands in `text` behind `head`, thoughts that are open or empty between the two left out, and blanks."""
        start = thoughtless(head)
        if text.startswith(start):
            return _thought(text[len(start) :])
        bare, wanted = "".join(text.split()), "".join(start.split())
        if not bare.startswith(wanted):
            raise NotAppendOnly(f"it is not append-only: {what} what was rendered before")
        self._same = False
        return _thought(bare[len(wanted) :])

    def _check_last(self, text: str, follow: str, what: str) -> None:
        if text != follow and text.split() != follow.split():
            raise NotAppendOnly(f"it is not append-only: {what} what was rendered before")
        self._same = self._same and text == follow

    def _check_opening(self, opening: str, answer: Message) -> None:
        """What stands in a history before an answer's text is always the same: the name of a channel, not something of the conversation."""
        if answer.tool_ids:
            return
        self._openings.add("".join(opening.split()))
        if len(self._openings) > 1:
            raise NotAppendOnly("it is not append-only: an answer begins otherwise in the history than it is asked for")

    def _check_tokens(self, asked: str, answer: str, follow: str, whole: str) -> None:
        if self._encode(asked) + self._encode(answer) + self._encode(follow) != self._encode(whole):
            raise NotAppendOnly("its turns do not begin and end at token boundaries")

    def _tell(self) -> None:
        if not self._same:
            log.warning("the chat template writes other blanks behind a message once an answer follows: those that the policy saw stay")
        writer = self._writer
        if SHOWN not in writer.root(HEADS[-1], [_ASKED]):
            log.warning("the chat template does not tell the policy of its tools: a harness's prompt must do it")
        for told, what in ((writer.habits.tools, "messages of tools: the user shows"), (writer.habits.calls, "calls: a history has")):
            if not told:
                log.warning("the chat template has no place for %s them", what)


def _marked(call: Message) -> Message:
    """A turn with one call, the mark in it."""
    return marked([(block["id"], block["name"]) for block in call.blocks])


def _answers(probe: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(probe) if message.role == "assistant"]


def _thought(text: str) -> str:
    """Without an empty thought, or the end of one, at the front."""
    text = text.lstrip()
    for opening, closing in THOUGHTS:
        rest = text.removeprefix(opening).lstrip()
        if rest.startswith(closing):
            return rest[len(closing) :].lstrip()
    return text
