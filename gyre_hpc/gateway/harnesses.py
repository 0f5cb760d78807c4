"""What is known of each harness, as data: how it is recognised, and how it words what it asks. Rules by shape are in roles.py.

Seen at the versions of docs/harnesses.md. A harness that is not here is GENERIC: no ids, every known wording. Invariant: nothing here
decides what is delivered or recorded; a harness that words things anew gets other roles (another order in training), never other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gyre_hpc.harness.texts import COMPACT

Patterns = tuple[re.Pattern[str], ...]


@dataclass(frozen=True)
class Harness:
    """One harness. `program`: how its User-Agent begins.

    `ids`: (header that its sub-agents alone send, header with the sub-agent's own id). With them, a conversation without an id is main's.
    `summary_asked`: in the last turn of a conversation that is to be summarised; `summary_system`: the system prompt of such a call.
    `side_system`: the system prompt of a side query (a title, a look back), which is nobody's conversation. `always_tools`: what it asks
    without tools is a side query, too, unless a summary is asked for. `own_words`: what it puts before the policy's words in a turn of the
    assistant; such a turn is its own. `forks`: a sub-agent without an id may begin with the turns of the conversation that it comes from.
    """

    name: str
    program: str = ""
    ids: tuple[str, str] | None = None
    summary_asked: Patterns = ()
    summary_system: Patterns = ()
    side_system: Patterns = ()
    always_tools: bool = False
    own_words: Patterns = ()
    forks: bool = False

    def agent(self, headers: Mapping[str, str]) -> str:
        """The id of the sub-agent that calls, or ""."""
        return header(headers, self.ids[1]) if self.ids and headers.get(self.ids[0]) else ""


def header(headers: Mapping[str, str], name: str) -> str:
    """A header as text that JSON and the record can say: bytes that are no UTF-8 come as halves of characters, and are spelt out."""
    return headers.get(name, "").encode(errors="backslashreplace").decode()


def _patterns(*texts: str) -> Patterns:
    return tuple(re.compile(text, re.IGNORECASE) for text in texts)


_CLAUDE_IDS = ("x-claude-code-agent-id", "x-claude-code-agent-id")
BUNDLED = Harness("bundled", "gyre-harness/", _CLAUDE_IDS, _patterns(rf"^{re.escape(COMPACT)}$"))
CLAUDE_CODE = Harness(
    "claude-code",
    "claude-cli/",
    _CLAUDE_IDS,
    _patterns(r"create a detailed summary of (the|this|our) conversation"),
    always_tools=True,
)
CODEX = Harness("codex", "codex", ("x-codex-parent-thread-id", "thread-id"), _patterns(r"CONTEXT CHECKPOINT COMPACTION"))
QWEN_CODE = Harness(
    "qwen-code",
    "QwenCode/",
    summary_asked=_patterns(r"(produce|generate) the <state_snapshot>"),
    summary_system=_patterns(r"^You are the component that summarizes"),
    side_system=_patterns(r"^You are now acting as the managed memory", r"^You are a (title|suggestion) generator"),
    own_words=_patterns(r"^Got it\. Thanks for the additional context!"),  # behind a summary, in the turn whose tools are still at work
    forks=True,
)
OPENCODE = Harness(
    "opencode",
    "opencode/",
    ("x-parent-session-id", "x-session-id"),
    _patterns(r"(detailed prompt for continuing|summari[sz]e) our conversation"),
    _patterns(r"^You are a (context summarization agent|helpful AI assistant tasked with summarizing)"),
    _patterns(r"^You are a title generator"),
    always_tools=True,
)
HARNESSES = (CLAUDE_CODE, CODEX, QWEN_CODE, OPENCODE, BUNDLED)


def _all(of: Iterable[Patterns]) -> Patterns:
    return tuple(pattern for patterns in of for pattern in patterns)


GENERIC = Harness(
    "generic",
    summary_asked=_all(h.summary_asked for h in HARNESSES),
    summary_system=_all(h.summary_system for h in HARNESSES),
    side_system=_all(h.side_system for h in HARNESSES),
)


def harness_of(headers: Mapping[str, str]) -> Harness:
    """Who sends this request, by its User-Agent, or by the ids that only one harness sends."""
    program = headers.get("User-Agent") or ""
    named = (harness for harness in HARNESSES if program.startswith(harness.program))
    known = (harness for harness in HARNESSES if harness.ids and headers.get(harness.ids[0]))
    return next(named, None) or next(known, GENERIC)
