"""The thought at the start of a turn, `<think>...</think>`, split off as the text streams in.

Invariants: however the text is cut, the same characters are thought and the same are rest; a thought that is never closed is a thought
to its end; blanks before the opening tag go with it. A thought that the prompt opened begins with the first character.
"""

from __future__ import annotations

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Thoughts:
    """Feed text, get (thought, rest). `inside`: the prompt already opened a thought; `sought` False: everything is rest."""

    def __init__(self, inside: bool, sought: bool = True) -> None:
        self._state = "over" if not sought else "inside" if inside else "start"
        self._buffer = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What can be told for certain after this text."""
        if self._state == "over":
            return "", text
        self._buffer += text
        if self._state == "start" and not self._started():
            return "", ""
        if self._state == "inside":
            thought, closed, rest = self._buffer.partition(THINK_CLOSE)
            if not closed:
                thought, self._buffer = hold_back(self._buffer, THINK_CLOSE)
                return thought, ""
        else:
            thought, rest = "", self._buffer
        self._buffer, self._state = "", "over"
        return thought, rest

    def finish(self) -> tuple[str, str]:
        """What was held back, once the text is over."""
        held, self._buffer = self._buffer, ""
        return (held, "") if self._state == "inside" else ("", held)

    def _started(self) -> bool:
        """Whether it is known what the turn begins with."""
        visible = self._buffer.lstrip()
        if visible.startswith(THINK_OPEN):
            self._buffer, self._state = visible[len(THINK_OPEN) :], "inside"
        elif visible and not THINK_OPEN.startswith(visible):
            self._state = "over"
        return self._state != "start"


def hold_back(text: str, tag: str) -> tuple[str, str]:
    """Split before the longest end of `text` that may be the beginning of `tag`."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at >= 0:
        if tag.startswith(text[at:]):
            return text[:at], text[at:]
        at = text.find(tag[0], at + 1)
    return text, ""
