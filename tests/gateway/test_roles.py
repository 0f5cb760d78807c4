"""The rules that tell what a call is, on the shapes that harnesses really send (design: harnesses.md)."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from gyre_hpc.gateway.dialects.canonical import Conversation, Head, normalise_message, normalise_messages
from gyre_hpc.gateway.harnesses import CLAUDE_CODE, CODEX, GENERIC, OPENCODE, QWEN_CODE, Harness
from gyre_hpc.gateway.notes import Answered
from gyre_hpc.gateway.roles import SIDE_QUERY_ROLE, History, Verdict, asks_for_summary
from gyre_hpc.harness.texts import COMPACT
from trees.matching import Match, chain
from trees.records import Role

TOOLS = ({"name": "bash", "description": "", "input_schema": {}},)
MAIN, SUB = Head("main", TOOLS), Head("sub", TOOLS)
TITLE = Head("You are a title generator. You output ONLY a thread title.")
CALL = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "a b"}
ASIDE = Verdict(SIDE_QUERY_ROLE, SIDE_QUERY_ROLE, "side-query")
CLEAN = Verdict(Role.MAIN, Role.MAIN, "clean")
COMPACTED = Verdict(Role.MAIN, Role.MAIN, "compaction")


class Script:
    """Feeds a History; every reply is sampled node 10, 11, ..."""

    def __init__(self, harness: Harness = GENERIC) -> None:
        self.harness = harness
        self.history = History()
        self.node = 10

    def ask(
        self,
        head: Head,
        *turns: str | dict[str, Any],
        node: int = -1,
        depth: int = 0,
        agent: str = "",
        reply: dict[str, Any] | str | None = None,
    ) -> Verdict:
        """Turns are user, assistant, user, ...; `node`: what the index matched after `depth` messages."""
        conversation = talk(head, *turns, harness=self.harness)
        asked = self.history.classify(conversation, place(conversation, depth, node), agent)
        self.history.note(asked)
        if reply is not None:
            turn = normalise_message("assistant", reply if isinstance(reply, str) else [reply])
            self.history.delivered(Answered(asked, turn.key, turn.tool_ids, self.node))
            self.node += 1
        return asked.verdict


def talk(head: Head, *turns: str | dict[str, Any], harness: Harness = GENERIC) -> Conversation:
    """Turns are user, assistant, user, ...; a block or its text."""
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    said = [{"role": r, "content": t if isinstance(t, str) else [t]} for r, t in zip(roles, turns, strict=True)]
    return Conversation(head, normalise_messages(said), harness)


def place(conversation: Conversation, depth: int, node: int) -> Match:
    """What the index says of a conversation whose first `depth` messages are known and end at `node`."""
    said = [conversation.head.canonical, *(turn.canonical for turn in conversation.messages)]
    digests = list(accumulate(said, chain, initial=b""))[1:]
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
    assert script.ask(Head("Make a title."), "task", reply="Title") == ASIDE
    assert script.ask(Head("Who speaks next?", TOOLS), "task", "b", "who?", reply="me") == ASIDE
    again = script.ask(Head("Who speaks next?", TOOLS), "task", "b", "who?", "me", "sure?", node=12, depth=4, reply="yes")
    assert again == Verdict(SIDE_QUERY_ROLE, SIDE_QUERY_ROLE, "clean")
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
        return asks_for_summary(talk(MAIN, "a", "b", text))

    assert asked(COMPACT)
    assert asked("Your task is to create a detailed summary of the conversation so far, paying close attention to ...")
    assert asked("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary")
    assert not asked("Please summarise this file")
    assert asked("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.")
    assert not asked("<state_snapshot>what was done</state_snapshot>\n\nResume the prior task using the summary above.")
    assert not asks_for_summary(talk(MAIN, COMPACT))
    assert asks_for_summary(talk(Head("You are a context summarization agent. You are given ..."), "<conversation>...", harness=OPENCODE))


@pytest.mark.parametrize("first", [True, False])
def test_opencode_asks_for_a_title_before_or_after_main_begins(first: bool) -> None:
    script = Script(OPENCODE)
    if first:
        assert script.ask(TITLE, "Generate a title", reply="T") == ASIDE
    assert script.ask(MAIN, "task", reply="b") == CLEAN
    if not first:
        assert script.ask(Head("A title of the user's own wording, please"), "Generate a title", reply="T") == ASIDE
    node = script.node - 1 if first else script.node - 2
    assert script.ask(MAIN, "task", "b", "c", node=node, depth=2, reply="d") == CLEAN
    assert script.ask(SUB, "part", agent="ses_2", reply="e") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent")
    assert script.ask(Head("plan mode", TOOLS), "task", "b", "c", "d", "e") == Verdict(
        Role.MAIN, Role.MAIN, "edit"
    )  # another agent of the user's


def test_opencode_summarises_its_conversation_told_as_text() -> None:
    script = Script(OPENCODE)
    script.ask(MAIN, "task", reply="b")
    summary = Head("You are a context summarization agent. You are given a conversation")
    assert script.ask(summary, "<conversation>task, b", reply="s") == Verdict(Role.MAIN, Role.MAIN_SUMMARY, "compaction")
    assert script.ask(MAIN, "What did we do so far?", "s", "Continue", reply="c") == COMPACTED
    assert script.ask(MAIN, "What did we do so far?", "s", "Continue", "c", "d", node=12, depth=4, reply="e") == CLEAN
    assert script.ask(summary, "<conversation>more", reply="s2") == Verdict(Role.MAIN, Role.MAIN_SUMMARY, "compaction")


def test_codex_summarises_without_its_tools() -> None:
    script = Script(CODEX)
    script.ask(MAIN, "task", reply=CALL)
    asked = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"
    assert script.ask(Head("main"), "task", CALL, asked, reply="s") == Verdict(Role.MAIN, Role.MAIN_SUMMARY, "compaction")
    assert script.ask(MAIN, "Another language model started ... s", reply="c") == COMPACTED


def test_qwen_summarises_under_another_system_prompt_whose_turns_these_are() -> None:
    script = Script(QWEN_CODE)
    script.ask(MAIN, "task", reply="b")
    script.ask(SUB, "part", reply=CALL)
    summary = Head("You are the component that summarizes a conversation when its context window is about to overflow.")
    asked = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
    assert script.ask(summary, "part", CALL, asked, reply="s") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY, "compaction")
    assert script.ask(SUB, "<state_snapshot>s", reply="d") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "compaction")
    memory = Head("You are now acting as the managed memory extraction subagent for an AI coding assistant.", TOOLS)
    assert script.ask(memory, "task", "b", "Managed memory has TWO directories.") == ASIDE
    assert script.ask(memory, "task") == ASIDE  # when what it replays was a thought alone


def test_a_fork_of_qwen_begins_with_the_turns_of_its_parent() -> None:
    """Under the same system prompt, with fewer tools."""
    script = Script(QWEN_CODE)
    script.ask(MAIN, "task", reply=CALL)
    fewer = Head("main", ({"name": "read", "description": "", "input_schema": {}},))
    assert script.ask(fewer, "task", CALL, "directive", reply="b") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent")
    assert script.ask(Head("Who speaks next?"), "task", CALL, "who?") == ASIDE


def test_a_turn_that_qwen_begins_with_words_of_its_own_is_no_drift() -> None:
    """After a compaction it puts them before the call that is still at work, and then edits the turn before."""
    script = Script(QWEN_CODE)
    script.ask(MAIN, "task", reply=CALL)
    asked = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
    script.ask(MAIN, "task", CALL, asked, node=10, depth=2, reply="s")
    for begin, difference in (("so far: s", "compaction"), ("reminder\nso far: s", "edit")):
        turns = talk(MAIN, begin, CALL, "tool's answer").messages
        words = {"type": "text", "text": "Got it. Thanks for the additional context!"}
        mixed = Conversation(MAIN, (turns[0], normalise_message("assistant", [words, CALL]), turns[2]), QWEN_CODE)
        verdict = script.history.classify(mixed, place(mixed, 0, -1), "")
        assert verdict.verdict == Verdict(Role.MAIN, Role.MAIN, difference)
        script.history.note(verdict)


def test_a_conversation_that_lost_its_first_answer_is_the_same_one_edited() -> None:
    """mini-swe-agent drops a turn without a tool call, before its complaint."""
    script = Script()
    script.ask(MAIN, "task", reply="no call")
    turns = normalise_messages([{"role": "user", "content": "task"}, {"role": "user", "content": "Tool call error"}])
    again = Conversation(MAIN, turns)
    assert script.history.classify(again, place(again, 0, -1), "").verdict == Verdict(Role.MAIN, Role.MAIN, "edit")
    assert script.ask(MAIN, "another task") == Verdict(Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent")


def test_where_sub_agents_have_ids_a_conversation_without_one_is_mains() -> None:
    script = Script(CLAUDE_CODE)
    script.ask(MAIN, "task", reply="b")
    assert script.ask(MAIN, "task, with a reminder") == Verdict(Role.MAIN, Role.MAIN, "edit")
    more = Head("main", (*TOOLS, {"name": "other", "description": "", "input_schema": {}}))
    assert script.ask(more, "task", "b", "c") == Verdict(Role.MAIN, Role.MAIN, "edit")
    assert script.ask(Head("Name this branch"), "task") == ASIDE


def test_the_first_conversation_with_tools_is_main_too() -> None:
    script = Script()
    assert script.ask(Head("Think of a name"), "task", reply="b") == CLEAN
    assert script.ask(MAIN, "task", reply="c") == CLEAN
    assert script.ask(SUB, "task", reply="d").role is Role.SUB_AGENT


def test_a_retried_side_query_does_not_become_main() -> None:
    script = Script(OPENCODE)
    script.ask(TITLE, "Generate")
    assert script.ask(TITLE, "Generate", reply="T") == replace(ASIDE, difference="retry")
    assert script.ask(MAIN, "task") == CLEAN


def test_a_sub_agent_that_is_forked_from_its_parent_leaves_it_alone() -> None:
    """Claude Code's `fork`: the child goes on from the parent's turn, under an id of its own, before the parent does."""
    script = Script(CLAUDE_CODE)
    script.ask(MAIN, "task", reply=CALL)
    assert script.ask(MAIN, "task", CALL, "do a part", node=10, depth=2, agent="a1", reply="done") == Verdict(
        Role.SUB_AGENT, Role.SUB_AGENT, "sub-agent"
    )
    assert script.ask(MAIN, "task", CALL, RESULT, node=10, depth=2, reply="done") == CLEAN
    assert script.ask(MAIN, "task", CALL, "do a part", "done", "more", node=11, depth=4, agent="a1").role is Role.SUB_AGENT


def test_a_tool_that_asks_the_model_itself_is_a_side_query() -> None:
    """Claude Code's web search: another prompt, one tool, no id; tools that are loaded later are the same conversation told anew."""
    script = Script(CLAUDE_CODE)
    script.ask(MAIN, "task", reply=CALL)
    assert script.ask(Head("search", TOOLS), "Perform a web search", reply="nothing") == ASIDE
    more = Head("main", (*TOOLS, {"name": "edit", "description": "", "input_schema": {}}))
    assert script.ask(more, "task", CALL, RESULT) == Verdict(Role.MAIN, Role.MAIN, "edit")
