"""What a call is within its execution: its role (selection classes) and how it relates to what was recorded.

A harness is a black box; these are rules by shape, and by the ids that some harnesses send. The order of the rules is the order of trust:
1. a conversation that continues a recorded turn keeps that turn's role;
2. an agent id (`x-claude-code-agent-id`, sub-agents only) makes a new conversation a sub-agent's;
3. a new conversation under a known head after a summary was asked for is the same agent, compacted;
4. a new conversation under another head is a sub-agent if it has tools, else a side query (titles, checks). Side queries train last.
A call that asks for a summary of its own conversation is `*_SUMMARY`; how harnesses word that is one table, `SUMMARY_REQUESTS`.
`difference` is told apart so that false forks are seen. `drift`: an assistant turn stands where ours was delivered, or carries one of our
tool calls, in a form which the canonical rules do not know; no intention of a harness explains it, and it should never be met
(`UNEXPLAINED`). `lost-call`: an assistant turn stands where a call was dispatched and no answer of it is recorded as delivered: a gateway
died, or a stream broke and the harness kept its beginning. Every other class is the harness's intention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gyre_hpc.gateway.canonical import Conversation, Message
from gyre_hpc.gateway.notes import Answered, Asked, Verdict
from gyre_hpc.harness.texts import COMPACT
from trees.matching import Match, chain
from trees.records import Role

__all__ = ["UNEXPLAINED", "History", "Verdict", "asks_for_summary"]

UNEXPLAINED = frozenset({"drift"})
"""Differences that no intention of a harness explains: a warning event tells of each."""
SUMMARY_REQUESTS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"^{re.escape(COMPACT)}$"),  # the bundled harness
    re.compile(r"create a detailed summary of (the|this|our) conversation", re.IGNORECASE),  # Claude Code
    re.compile(r"CONTEXT CHECKPOINT COMPACTION"),  # Codex
    re.compile(r"<state_snapshot>"),  # qwen-code
    re.compile(r"(detailed prompt for continuing|summari[sz]e) our conversation", re.IGNORECASE),  # opencode
)
_SUMMARY_OF = {Role.MAIN: Role.MAIN_SUMMARY, Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY}
SIDE_QUERY_ROLE = Role.SUB_AGENT_SUMMARY


@dataclass
class History:
    """What one execution has asked so far. Only `note` and `delivered` change it, by what a restart finds in the journal again."""

    prompts: dict[tuple[str, bytes], Verdict] = field(default_factory=dict)
    """(agent, digest of the whole history) -> the verdict when it came first; a retry is judged the same."""
    heads: set[bytes] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    continued: dict[int, bool] = field(default_factory=dict)
    """Sampled node -> whether it was continued by something else than a request for a summary."""
    base_of: dict[int, Role] = field(default_factory=dict)
    summarised: dict[str, Role] = field(default_factory=dict)
    """Agent whose conversation was just summarised -> its base role."""
    replies: set[bytes] = field(default_factory=set)
    tool_ids: set[str] = field(default_factory=set)
    answered: dict[bytes, bool] = field(default_factory=dict)
    """Digest of a prompt that was asked -> whether an answer was delivered."""

    def classify(self, conversation: Conversation, match: Match, agent: str) -> Asked:
        """The judgement on a request that continues what `match` found (node -1: nothing). O(what is new)."""
        strange, prompt = self._strange(conversation.messages[match.depth :], match.digest)
        verdict = self._verdict(conversation, match, agent, prompt, strange)
        return Asked(agent, conversation.head.key, prompt, match.node, verdict)

    def note(self, asked: Asked) -> None:
        """This request was accepted."""
        verdict, node = asked.verdict, asked.node
        self.prompts.setdefault((asked.agent, asked.prompt), verdict)
        self.answered.setdefault(asked.prompt, False)
        self.agents.add(asked.agent)
        if verdict.difference != "side-query":
            self.heads.add(asked.head)
        if node >= 0:
            self.continued[node] = self.continued.get(node, False) or verdict.role is verdict.base
        elif verdict.difference == "compaction":
            self.summarised.pop(asked.agent, None)

    def delivered(self, answered: Answered) -> None:
        """The answer was recorded and handed to the harness."""
        asked, verdict = answered.asked, answered.asked.verdict
        self.base_of[answered.sampled] = verdict.base
        self.answered[asked.prompt] = True
        self.replies.add(answered.reply)
        self.tool_ids.update(answered.tools)
        if verdict.role is _SUMMARY_OF[verdict.base] and verdict.difference != "side-query":
            self.summarised[asked.agent] = verdict.base

    def _verdict(self, conversation: Conversation, match: Match, agent: str, prompt: bytes, strange: str) -> Verdict:
        before = self.prompts.get((agent, prompt))
        if before is not None:
            return replace(before, difference="retry")
        summary = asks_for_summary(conversation.messages)
        if match.node >= 0:
            base = self.base_of.get(match.node, Role.MAIN)
            difference = strange or self._continued(conversation.messages[match.depth :], match.node, summary)
        else:
            base, difference = self._opened(conversation, agent)
            difference = strange if strange and difference == "edit" else difference
        if difference == "side-query":
            return Verdict(base, SIDE_QUERY_ROLE, difference)
        return Verdict(base, _SUMMARY_OF[base] if summary else base, difference)

    def _strange(self, tail: Sequence[Message], digest: bytes) -> tuple[str, bytes]:
        """`drift`, `lost-call` or "" by the first turn behind `digest` that we know nothing of; and the digest behind all of `tail`."""
        found = ""
        for turn in tail:
            if not found and turn.role == "assistant" and turn.key not in self.replies:
                place = self.answered.get(digest)
                found = "drift" if place or self._ours(turn) else "lost-call" if place is False else ""
            digest = chain(digest, turn.canonical)
        return found, digest

    def _continued(self, tail: Sequence[Message], node: int, summary: bool) -> str:
        echoed = any(turn.role == "assistant" for turn in tail)
        return "edit" if echoed or (self.continued.get(node, False) and not summary) else "clean"

    def _opened(self, conversation: Conversation, agent: str) -> tuple[Role, str]:
        known_head = conversation.head.key in self.heads
        if agent in self.summarised and known_head:
            return self.summarised[agent], "compaction"
        if agent:
            return Role.SUB_AGENT, "sub-agent" if agent not in self.agents else "edit"
        if "" not in self.agents:
            return Role.MAIN, "clean"
        if any(turn.role == "assistant" for turn in conversation.messages):
            return Role.MAIN, "edit" if known_head else "side-query"
        if not known_head and not conversation.head.tools:
            return Role.MAIN, "side-query"
        return Role.SUB_AGENT, "sub-agent"

    def _ours(self, turn: Message) -> bool:
        return any(tool in self.tool_ids for tool in turn.tool_ids)


def asks_for_summary(messages: Sequence[Message]) -> bool:
    """The last turn asks to summarise the conversation before it."""
    if not any(turn.role == "assistant" for turn in messages):
        return False
    texts = [block["text"] for block in messages[-1].blocks if block["type"] == "text"]
    return any(pattern.search(text) for text in texts for pattern in SUMMARY_REQUESTS)
