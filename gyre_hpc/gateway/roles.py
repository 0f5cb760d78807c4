"""What a call is within its execution: its role (selection classes) and how it relates to what was recorded.

A harness is a black box; these are rules by shape, and by the ids that some harnesses send. The order of the rules is the order of trust:
1. a conversation that continues a recorded turn keeps that turn's role;
2. an agent id (`x-claude-code-agent-id`, sub-agents only) makes a new conversation a sub-agent's;
3. a new conversation under a known head after a summary was asked for is the same agent, compacted;
4. a new conversation under another head is a sub-agent if it has tools, else a side query (titles, checks). Side queries train last.
A call that asks for a summary of its own conversation is `*_SUMMARY`; how harnesses word that is one table, `SUMMARY_REQUESTS`.
`difference` is told apart so that false forks are seen: `drift` is a turn that we delivered and that came back in a form which the
canonical rules do not know; it should never be met, and every other class is the harness's intention.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gyre_hpc.gateway.canonical import Conversation, Message
from gyre_hpc.harness.texts import COMPACT
from trees.records import Role

SUMMARY_REQUESTS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"^{re.escape(COMPACT)}$"),  # the bundled harness
    re.compile(r"create a detailed summary of (the|this|our) conversation", re.IGNORECASE),  # Claude Code
    re.compile(r"CONTEXT CHECKPOINT COMPACTION"),  # Codex
    re.compile(r"<state_snapshot>"),  # qwen-code
    re.compile(r"(detailed prompt for continuing|summari[sz]e) our conversation", re.IGNORECASE),  # opencode
)
_SUMMARY_OF = {Role.MAIN: Role.MAIN_SUMMARY, Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY}
SIDE_QUERY_ROLE = Role.SUB_AGENT_SUMMARY


@dataclass(frozen=True)
class Verdict:
    """`base`: MAIN or SUB_AGENT, what the conversation goes on as; `role`: of this call; `difference`: see trees.records.CallEnd."""

    base: Role
    role: Role
    difference: str


@dataclass
class History:
    """What one execution has asked so far. Only `note` and `delivered` change it."""

    prompts: dict[tuple[str, bytes], Verdict] = field(default_factory=dict)
    """(agent, prompt) -> the verdict when it came first; a retry is judged the same."""
    heads: set[bytes] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    continued: dict[int, bool] = field(default_factory=dict)
    """Sampled node -> whether it was continued by something else than a request for a summary."""
    base_of: dict[int, Role] = field(default_factory=dict)
    summarised: dict[str, Role] = field(default_factory=dict)
    """Agent whose conversation was just summarised -> its base role."""
    replies: set[bytes] = field(default_factory=set)
    tool_ids: set[str] = field(default_factory=set)

    def classify(self, conversation: Conversation, depth: int, node: int, agent: str) -> Verdict:
        """The verdict on a request that continues the recorded `node` after `depth` messages (node -1: nothing)."""
        before = self.prompts.get((agent, conversation.key))
        if before is not None:
            return replace(before, difference="retry")
        summary = asks_for_summary(conversation.messages)
        if node >= 0:
            base = self.base_of.get(node, Role.MAIN)
            difference = self._continued(conversation.messages[depth:], node, summary)
        else:
            base, difference = self._opened(conversation, agent)
        if difference == "side-query":
            return Verdict(base, SIDE_QUERY_ROLE, difference)
        return Verdict(base, _SUMMARY_OF[base] if summary else base, difference)

    def note(self, conversation: Conversation, node: int, agent: str, verdict: Verdict) -> None:
        """This request was accepted."""
        self.prompts.setdefault((agent, conversation.key), verdict)
        self.agents.add(agent)
        if verdict.difference != "side-query":
            self.heads.add(conversation.head.key)
        if node >= 0:
            self.continued[node] = self.continued.get(node, False) or verdict.role is verdict.base
        elif verdict.difference == "compaction":
            self.summarised.pop(agent, None)

    def delivered(self, reply: Message, sampled: int, agent: str, verdict: Verdict) -> None:
        """The answer was recorded as `sampled` and handed to the harness as `reply`."""
        self.base_of[sampled] = verdict.base
        self.replies.add(reply.key)
        self.tool_ids.update(reply.tool_ids)
        if verdict.role is _SUMMARY_OF[verdict.base] and verdict.difference != "side-query":
            self.summarised[agent] = verdict.base

    def _continued(self, tail: Sequence[Message], node: int, summary: bool) -> str:
        echoed = [turn for turn in tail if turn.role == "assistant"]
        if any(turn.key not in self.replies and self._ours(turn) for turn in echoed):
            return "drift"
        if echoed or (self.continued.get(node, False) and not summary):
            return "edit"
        return "clean"

    def _opened(self, conversation: Conversation, agent: str) -> tuple[Role, str]:
        known_head = conversation.head.key in self.heads
        if agent in self.summarised and known_head:
            return self.summarised[agent], "compaction"
        if agent:
            return Role.SUB_AGENT, "sub-agent" if agent not in self.agents else "edit"
        if "" not in self.agents:
            return Role.MAIN, "clean"
        echoed = [turn for turn in conversation.messages if turn.role == "assistant"]
        if echoed:
            if not known_head:
                return Role.MAIN, "side-query"
            return Role.MAIN, "drift" if any(turn.key not in self.replies and self._ours(turn) for turn in echoed) else "edit"
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
