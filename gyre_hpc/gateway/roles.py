"""What a call is within its execution: its role (selection classes) and how it relates to what was recorded.

A harness is a black box; these are rules by shape and by the ids that some harnesses send, with each harness's wording from harnesses.py.
The order of the rules is the order of trust:
1. a conversation that continues a recorded turn keeps that turn's role, unless an agent's id comes with it for the first time (a
   sub-agent that is forked from its parent); one that asks for a summary of itself is `*_SUMMARY`;
2. a new conversation that asks for a summary (of turns told under another head, or as text) summarises its agent's conversation;
3. a known wording is a side query (titles, looks back), and so is what has neither tools nor an id where the harness always gives tools;
   what continues a side query is one;
4. after a summary the same agent's next conversation is the same one, compacted;
5. an agent's id makes a new conversation a sub-agent's; no id, where the harness gives ids, makes it main's if its head or its turns are
   known, else a side query (a tool that asks the model itself);
6. without ids: the first conversation is main's; so is the first with tools, if main had none; one that begins like another under the same
   head is that one, edited; under another head it is a sub-agent if it has tools, else, or when it tells our turns, a side query (but a
   sub-agent where a harness makes forks).
Side queries train last, whoever asks them and whenever: a title that is asked before the first real call does not take main's place.
`difference` is told apart so that false forks are seen. `drift`: an assistant turn stands where ours was delivered, or carries one of our
tool calls, in a form which the canonical rules do not know; no intention of a harness explains it, and it should never be met
(`UNEXPLAINED`). `lost-call`: an assistant turn stands where a call was dispatched and no answer of it is recorded as delivered: a gateway
died, or a stream broke and the harness kept its beginning (qwen-code puts the next answer's
calls behind that, in one turn). Every other class is the harness's intention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gyre_hpc.gateway.dialects.canonical import Conversation, Message
from gyre_hpc.gateway.harnesses import Patterns
from gyre_hpc.gateway.notes import Answered, Asked, Verdict
from trees.matching import Match, chain
from trees.records import Role

__all__ = ["UNEXPLAINED", "History", "Verdict", "asks_for_summary"]

UNEXPLAINED = frozenset({"drift"})
"""Differences that no intention of a harness explains: a warning event tells of each."""
_SUMMARY_OF = {Role.MAIN: Role.MAIN_SUMMARY, Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY}
SIDE_QUERY_ROLE = Role.SUB_AGENT_SUMMARY
_SIDE = (SIDE_QUERY_ROLE, "side-query")


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
    tool_ids: dict[str, Role] = field(default_factory=dict)
    """Id of a tool call of ours -> base role of the conversation that it was made in."""
    answered: dict[bytes, bool] = field(default_factory=dict)
    """Digest of a prompt that was asked -> whether an answer was delivered."""
    begun: dict[tuple[bytes, bytes], Role] = field(default_factory=dict)
    """(head, first turn) of a conversation without an agent's id -> its base role."""
    main_has_tools: bool = False

    def classify(self, conversation: Conversation, match: Match, agent: str) -> Asked:
        """The judgement on a request that continues what `match` found (node -1: nothing). O(what is new)."""
        own_words = conversation.harness.own_words
        strange, prompt = self._strange(conversation.messages[match.depth :], match.digest, own_words)
        verdict = self._verdict(conversation, match, agent, prompt, strange)
        first = conversation.messages[0].key if match.node < 0 and conversation.messages else b""
        return Asked(agent, conversation.head.key, prompt, match.node, verdict, first, bool(conversation.head.tools))

    def note(self, asked: Asked) -> None:
        """This request was accepted."""
        verdict, node = asked.verdict, asked.node
        self.prompts.setdefault((asked.agent, asked.prompt), verdict)
        self.answered.setdefault(asked.prompt, False)
        if verdict.base is not SIDE_QUERY_ROLE:
            self._note_conversation(asked)
        if node >= 0 and verdict.difference != "sub-agent":
            self.continued[node] = self.continued.get(node, False) or verdict.role is verdict.base
        elif verdict.difference == "compaction" and verdict.role is verdict.base:
            self.summarised.pop(asked.agent, None)

    def delivered(self, answered: Answered) -> None:
        """The answer was recorded and handed to the harness."""
        asked, verdict = answered.asked, answered.asked.verdict
        self.base_of[answered.sampled] = verdict.base
        self.answered[asked.prompt] = True
        self.replies.add(answered.reply)
        self.tool_ids.update(dict.fromkeys(answered.tools, verdict.base))
        if verdict.role is not verdict.base:
            self.summarised[asked.agent] = verdict.base

    def _note_conversation(self, asked: Asked) -> None:
        verdict = asked.verdict
        self.agents.add(asked.agent)
        if verdict.role is verdict.base:  # the head of a request for a summary is nobody's
            self.heads.add(asked.head)
            self.main_has_tools |= asked.tools and verdict.base is Role.MAIN
            if asked.first and not asked.agent:
                self.begun.setdefault((asked.head, asked.first), verdict.base)

    def _verdict(self, conversation: Conversation, match: Match, agent: str, prompt: bytes, strange: str) -> Verdict:
        before = self.prompts.get((agent, prompt))
        if before is not None:
            return replace(before, difference="retry")
        summary = asks_for_summary(conversation)
        if match.node >= 0 and agent and agent not in self.agents:
            base, difference = Role.SUB_AGENT, "sub-agent"
        elif match.node >= 0:
            base = self.base_of.get(match.node, Role.MAIN)
            difference = strange or self._continued(conversation.messages[match.depth :], match.node, summary)
        else:
            base, difference = self._opened(conversation, agent, summary)
            difference = strange if strange and difference == "edit" else difference
        return Verdict(base, _SUMMARY_OF.get(base, base) if summary else base, difference)

    def _strange(self, tail: Sequence[Message], digest: bytes, own_words: Patterns) -> tuple[str, bytes]:
        """`drift`, `lost-call` or "" by the first turn behind `digest` that we know nothing of; and the digest behind all of `tail`."""
        found = ""
        for turn in tail:
            if not found and turn.role == "assistant" and turn.key not in self.replies and not _any(own_words, turn.text):
                place = self.answered.get(digest)
                ours = any(tool in self.tool_ids for tool in turn.tool_ids)
                found = "lost-call" if place is False else "drift" if place or ours else ""
            digest = chain(digest, turn.key)
        return found, digest

    def _continued(self, tail: Sequence[Message], node: int, summary: bool) -> str:
        echoed = any(turn.role == "assistant" for turn in tail)
        return "edit" if echoed or (self.continued.get(node, False) and not summary) else "clean"

    def _opened(self, conversation: Conversation, agent: str, summary: bool) -> tuple[Role, str]:
        harness, head = conversation.harness, conversation.head
        known = head.key in self.heads
        if summary and agent in self.agents:
            return self._owner(conversation) or (Role.SUB_AGENT if agent else Role.MAIN), "compaction"
        if _any(harness.side_system, head.system) or (harness.always_tools and not head.tools and not agent):
            return _SIDE
        if agent in self.summarised and (known or harness.ids):
            return self.summarised[agent], "compaction"
        if agent:
            return Role.SUB_AGENT, "edit" if agent in self.agents else "sub-agent"
        if "" not in self.agents:
            return Role.MAIN, "clean"
        if harness.ids:
            return (Role.MAIN, "edit") if known or self._tells_ours(conversation) else _SIDE
        return self._opened_unnamed(conversation, known)

    def _opened_unnamed(self, conversation: Conversation, known: bool) -> tuple[Role, str]:
        """By shape alone, main having been there before."""
        head, messages = conversation.head, conversation.messages
        if any(turn.role == "assistant" for turn in messages):
            if known:
                return self._owner(conversation) or Role.MAIN, "edit"
            return (Role.SUB_AGENT, "sub-agent") if conversation.harness.forks and head.tools else _SIDE
        if (head.key, messages[0].key) in self.begun:
            return self.begun[head.key, messages[0].key], "edit"
        if known:
            return Role.SUB_AGENT, "sub-agent"
        if not head.tools:
            return _SIDE
        return (Role.SUB_AGENT, "sub-agent") if self.main_has_tools else (Role.MAIN, "clean")

    def _tells_ours(self, conversation: Conversation) -> bool:
        spoken = [turn for turn in conversation.messages if turn.role == "assistant"]
        return any(turn.key in self.replies for turn in spoken) or self._owner(conversation) is not None

    def _owner(self, conversation: Conversation) -> Role | None:
        """Whose turns it tells, by the ids of their tool calls."""
        told = (self.tool_ids.get(tool) for turn in reversed(conversation.messages) for tool in turn.tool_ids)
        return next((base for base in told if base is not None and base is not SIDE_QUERY_ROLE), None)


def asks_for_summary(conversation: Conversation) -> bool:
    """It asks to summarise a conversation: its own so far, or one that it tells."""
    harness, messages = conversation.harness, conversation.messages
    if _any(harness.summary_system, conversation.head.system):
        return True
    if not any(turn.role == "assistant" for turn in messages):
        return False
    texts = [block["text"] for block in messages[-1].blocks if block["type"] == "text"]
    return any(_any(harness.summary_asked, text) for text in texts)


def _any(patterns: Patterns, text: str) -> bool:
    return any(pattern.search(text) for pattern in patterns)
