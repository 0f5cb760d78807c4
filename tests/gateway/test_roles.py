"""The rules that tell what a call is, on the shapes that harnesses really send (design: harnesses.md)."""

from __future__ import annotations

from typing import Any

import pytest

from gyre_hpc.gateway.canonical import Conversation, Head, normalise_message, normalise_messages
from gyre_hpc.gateway.notes import Answered
from gyre_hpc.gateway.roles import History, Verdict, asks_for_summary
from gyre_hpc.harness.texts import COMPACT
from trees.matching import Match, boundaries
from trees.records import Role

TOOLS = ({"name": "bash", "description": "", "input_schema": {}},)
MAIN, SUB = Head("main", TOOLS), Head("sub", TOOLS)


class Script:
    """Feeds a History; every reply is sampled node 10, 11, ..."""

    def __init__(self) -> None:
        self.history = History()
        self.node = 10

    def ask(
        self, head: Head, *turns: str, node: int = -1, depth: int = 0, agent: str = "", reply: dict[str, Any] | str | None = None
    ) -> Verdict:
        """Turns are user, assistant, user, ...; `node`: what the index matched after `depth` messages."""
        roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
        conversation = Conversation(head, normalise_messages({"role": r, "content": t} for r, t in zip(roles, turns, strict=True)))
        asked = self.history.classify(conversation, place(conversation, depth, node), agent)
        self.history.note(asked)
        if reply is not None:
            turn = normalise_message("assistant", reply if isinstance(reply, str) else [reply])
            self.history.delivered(Answered(asked, turn.key, turn.tool_ids, self.node))
            self.node += 1
        return asked.verdict


def place(conversation: Conversation, depth: int, node: int) -> Match:
    """What the index says of a conversation whose first `depth` messages are known and end at `node`."""
    digests = list(boundaries(conversation.head.canonical, [turn.canonical for turn in conversation.messages]))
    return Match(depth, node, digests[depth])


def test_clean_continuation_retry_and_edit() -> None:
    script = Script()
    assert script.ask(MAIN, "a", reply="b") == Verdict(Role.MAIN, Role.MAIN, "clean")
    assert script.ask(MAIN, "a", "b", "c", node=10, depth=2, reply="d").difference == "clean"
    assert script.ask(MAIN, "a", "b", "c", node=10, depth=2).difference == "retry"
    assert script.ask(MAIN, "a", "b", "x", node=10, depth=2).difference == "edit"
    assert script.ask(MAIN, "a", "b", "y", "d", "z", node=10, depth=2).difference == "edit"


def test_a_turn_of_ours_in_an_unknown_form_is_drift() -> None:
    script = Script()
    call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}
    script.ask(MAIN, "a", reply="b")
    script.ask(MAIN, "a", "b", "c", node=10, depth=2, reply=call)
    changed = normalise_message("assistant", [{**call, "input": {"raw": "ls"}}])
    turns = normalise_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
    again = Conversation(MAIN, (*turns, changed, *normalise_messages([{"role": "user", "content": "d"}])))
    assert script.history.classify(again, place(again, 2, 10), "").verdict.difference == "drift"


def test_sub_agents_by_id_and_by_head() -> None:
    script = Script()
    assert script.ask(SUB, "part", agent="a1", reply="done") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent")
    assert script.ask(MAIN, "task", reply="x") == Verdict(Role.MAIN, Role.MAIN, "clean")
    assert script.ask(SUB, "other part", reply="y") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent")
    assert script.ask(SUB, "other part", "y", "more", node=12, depth=2).role is Role.SUB_AGENT
    assert script.ask(SUB, "part", "done", "more", node=10, depth=2, agent="a1") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "clean")


def test_side_queries_train_last_and_leave_the_main_conversation_alone() -> None:
    script = Script()
    script.ask(MAIN, "task", reply="b")
    assert script.ask(Head("Make a title."), "task", reply="Title") == Verdict(Role.MAIN, Role.SUB_AGENT_SUMMARY, "side-query")
    assert script.ask(Head("Who speaks next?", TOOLS), "task", "b", "who?").difference == "side-query"
    assert script.ask(MAIN, "task", "b", "c", node=10, depth=2) == Verdict(Role.MAIN, Role.MAIN, "clean")


@pytest.mark.parametrize(("agent", "base", "summary"), [("", Role.MAIN, Role.MAIN_SUMMARY), ("a1", Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY)])
def test_compaction(agent: str, base: Role, summary: Role) -> None:
    script = Script()
    script.ask(MAIN, "task", agent=agent, reply="b")
    assert script.ask(MAIN, "task", "b", COMPACT, node=10, depth=2, agent=agent, reply="") == Verdict(base, summary, "clean")
    assert script.ask(MAIN, "task", "b", "c", node=10, depth=2, agent=agent).difference == "clean"  # the summary did not use up the turn
    assert script.ask(MAIN, "task\nSo far: ", agent=agent, reply="x") == Verdict(base, base, "compaction")
    assert script.ask(MAIN, "unrelated", agent=agent).difference != "compaction"


def test_a_retried_opening_keeps_its_role() -> None:
    script = Script()
    script.ask(SUB, "part", agent="a1")
    assert script.ask(SUB, "part", agent="a1", reply="x") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "retry")
    script.ask(MAIN, "task")
    assert script.ask(MAIN, "task", reply="b") == Verdict(Role.MAIN, Role.MAIN, "retry")
    script.ask(MAIN, "task", "b", COMPACT, node=11, depth=2)
    assert script.ask(MAIN, "task", "b", COMPACT, node=11, depth=2, reply="s") == Verdict(Role.MAIN, Role.MAIN_SUMMARY, "retry")
    script.ask(MAIN, "so far s")
    assert script.ask(MAIN, "so far s", reply="c") == Verdict(Role.MAIN, Role.MAIN, "retry")
    assert script.ask(MAIN, "so far s", "c", "d", node=13, depth=2) == Verdict(Role.MAIN, Role.MAIN, "clean")


def test_how_harnesses_ask_for_a_summary() -> None:
    def asked(text: str) -> bool:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": text}]
        return asks_for_summary(normalise_messages(turns))

    assert asked(COMPACT)
    assert asked("Your task is to create a detailed summary of the conversation so far, paying close attention to ...")
    assert asked("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary")
    assert not asked("Please summarise this file")
    assert not asks_for_summary(normalise_messages([{"role": "user", "content": COMPACT}]))
