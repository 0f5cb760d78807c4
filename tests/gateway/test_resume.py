"""A recorder that goes on where another one was killed: the same node, the same judgement, the recorded answer again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre_hpc.engines.protocol import EngineFault
from gyre_hpc.gateway.calls import CallFailed, Ended, Started
from gyre_hpc.gateway.dialects.canonical import Head
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.resume import read_past
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.toolcalls import blocks_of
from gyre_hpc.harness.texts import COMPACT
from tests.gateway.fakes import Bench, ScriptedEngine, bench, tool_call
from tests.gateway.test_recorder import HEAD, Messages, ask, finished, request, result, say
from trees.files import LOCK
from trees.matching import MessageIndex
from trees.records import Boundary, Fate, Record, Role
from trees.store import StoreWriter


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


@asynccontextmanager
async def after_a_kill(made: Bench) -> AsyncIterator[Bench]:
    """What a new process finds that starts now, as if the old one had been killed: the bytes that are on the disk."""
    copy = made.directory.with_name("copy")
    shutil.copytree(made.directory, copy, ignore=shutil.ignore_patterns(LOCK))
    store = StoreWriter(copy)
    engine = ScriptedEngine(made.renderer)
    forks: list[Exception] = []
    recorder = Recorder(store, made.renderer, engine, RecorderSettings(seed=1, window=4096), forks.append)
    try:
        yield Bench(copy, made.renderer, engine, store, recorder, forks)
    finally:
        engine.gate.set()
        await recorder.close()
        store.close()
        shutil.rmtree(copy)


async def test_a_conversation_goes_on_at_its_node(made: Bench) -> None:
    history = result(await ask(made, say("go"), "Look. " + tool_call("bash", command="ls", n=2.0)))
    async with after_a_kill(made) as new:
        assert new.recorder.resume(0) == 0
        assert new.recorder.usage(0) == made.recorder.usage(0)
        await ask(new, history, "done")
        tree = new.tree()
        assert [call.difference for call in tree.calls.values()] == ["clean", "clean"]
        assert len(tree.leaves) == 1
        first, second = tree.calls.values()
        assert tree.path(second.prompt)[: len(tree.path(first.sampled))] == tree.path(first.sampled)
        assert new.engine.seen[0].prompt == tree.tokens_of(tree.path(second.prompt)).tolist()
        assert not tree.incomplete


@pytest.mark.parametrize("reply", ["plain ", "<think>hm</think>Look. " + tool_call("bash", command="ls"), "cut:only half", "<tool_call>{"])
async def test_a_finished_call_that_is_asked_again_gets_the_recorded_answer(made: Bench, reply: str) -> None:
    await ask(made, say("go"), reply)
    before = await finished(made.recorder.open(0, request(say("go"))))
    async with after_a_kill(made) as new:
        new.recorder.resume(0)
        again = await finished(new.recorder.open(0, request(say("go"))))
        assert new.engine.seen == []
        assert (again.events[0], again.events[-1]) == (before.events[0], before.events[-1])
        told, telling = ([e for e in stream.events if not isinstance(e, Started | Ended)] for stream in (before, again))
        assert blocks_of(told) == blocks_of(telling)
        assert len(new.tree().calls) == 1


async def test_only_the_last_answers_are_kept_as_events_and_all_can_be_told_again(made: Bench) -> None:
    for n in range(9):
        await ask(made, say(f"task {n}"), f"answer {n}")
    for n in range(9):
        stream = await finished(made.recorder.open(0, request(say(f"task {n}"))))
        assert blocks_of(e for e in stream.events if not isinstance(e, Started | Ended)) == ({"type": "text", "text": f"answer {n}"},)
    assert len(made.engine.seen) == 9


async def test_a_lost_call_leaves_the_tree_incomplete_and_its_retry_is_a_new_call(made: Bench) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("never to be seen")
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    await asyncio.wait_for(stream.after(1, 5), 6)
    async with after_a_kill(made) as new:
        assert new.recorder.resume(0) == 1
        await ask(new, say("go"), "again")
        lost, retried = new.tree().calls.values()
        assert (lost.fate, retried.fate, retried.difference) == (None, Fate.DELIVERED, "retry")
        assert new.tree().incomplete
    stream.leave()


@pytest.mark.parametrize("killed", [True, False])
async def test_a_turn_that_was_never_recorded_as_delivered_is_told_apart(made: Bench, killed: bool) -> None:
    """The harness kept what it saw of an answer; the gateway was killed in its midst, or the engine broke."""
    history = await ask(made, say("go"), "first")
    asked: Messages = [*history, {"role": "user", "content": "more"}]
    made.engine.gate.clear()
    made.engine.replies.append("half of it")
    stream = made.recorder.open(0, request(asked))
    stream.follow()
    await asyncio.wait_for(stream.after(1, 5), 6)
    kept: Messages = [*asked, {"role": "assistant", "content": "hal"}, {"role": "user", "content": "go on"}]
    if killed:
        async with after_a_kill(made) as new:
            assert new.recorder.resume(0) == 1
            await ask(new, kept)
            assert [call.difference for call in new.tree().calls.values()] == ["clean", "", "lost-call"]
            assert new.tree().incomplete
        stream.leave()
    else:
        stream.leave()
        made.engine.gate.set()
        await ask(made, kept)
        assert [call.difference for call in made.tree().calls.values()] == ["clean", "clean", "lost-call"]
        assert not made.tree().incomplete


async def test_an_answer_whose_place_was_not_written_down_is_superseded_by_its_retry(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill fell between the end of the call and its boundary: told again, the answer would come back as text that nobody knows."""
    append = made.store.append

    def without_answers(record: Record) -> None:
        if not (isinstance(record, Boundary) and record.node != made.store.forest.intents[record.call].prompt):
            append(record)

    monkeypatch.setattr(made.store, "append", without_answers)
    await ask(made, say("go"), "first")
    async with after_a_kill(made) as new:
        assert new.recorder.resume(0) == 0
        await ask(new, [*await ask(new, say("go"), "second"), *say("on")])
        calls = list(new.tree().calls.values())
        assert [(call.fate, call.difference) for call in calls] == [
            (Fate.SUPERSEDED, "clean"),
            (Fate.DELIVERED, "retry"),
            (Fate.DELIVERED, "clean"),
        ]


@pytest.mark.parametrize("restarted", [True, False])
async def test_no_history_goes_on_behind_a_superseded_answer(made: Bench, restarted: bool) -> None:
    """The harness leaves out the answer that it got last: the one before, which it never took, is not put in its place."""
    for reply in ("<think>nothing to say</think>", "yes"):
        await ask(made, say("go"), reply)
    async with after_a_kill(made) as new:
        new.recorder.resume(0)
        chosen = new if restarted else made
        await ask(chosen, [*say("go"), *say("more")])
        tree = chosen.tree()
        silent, _, last = tree.calls.values()
        assert silent.fate is Fate.SUPERSEDED
        assert silent.sampled not in tree.path(last.prompt)


async def test_judgements_are_those_of_the_process_before(made: Bench) -> None:
    history = await ask(made, say("go"), "first")
    summarised: Messages = [*history, {"role": "user", "content": COMPACT}]
    await ask(made, summarised, "summary")
    await ask(made, say("part"), "sub", agent="a1")
    async with after_a_kill(made) as new:
        new.recorder.resume(0)
        await ask(new, [*say("part"), {"role": "assistant", "content": "sub"}, *say("on")], agent="a1")
        await ask(new, say("So far: summary"))
        await ask(new, [*history, *say("again")])
        judged = [(call.role, call.difference) for call in new.tree().calls.values()][3:]
        assert judged == [(Role.SUB_AGENT, "clean"), (Role.MAIN, "compaction"), (Role.MAIN, "clean")]


async def test_a_journal_without_boundaries_or_with_notes_of_others_still_goes_on(made: Bench, caplog: pytest.LogCaptureFixture) -> None:
    history = await ask(made, say("go"), "first")
    forest = made.store.forest
    forest.boundaries[0] = {key: Boundary(b.execution, b.call, b.node, b.depth, b.digest, b"?") for key, b in forest.boundaries[0].items()}
    past = read_past(forest, 0)
    assert "boundary of call 0 can't be read" in caplog.text
    assert (past.places, len(past.delivered), past.calls, past.tokens) == ([], 1, 1, 6)
    del forest.boundaries[0]
    assert made.recorder.resume(0) == 0
    await ask(made, [*history, *say("on")], "second")
    assert len(made.tree().calls) == 2


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_harness_does_the_journal_tells_the_same_history(made: Bench, seed: int) -> None:
    """Random conversations, edits, sub-agents, summaries, titles, broken and cancelled calls: what a restart would read is what is held."""
    rng = random.Random(seed)
    histories: list[tuple[str, Head, Messages]] = []
    for n in range(30):
        kind = rng.choice(["new", "on", "on", "on", "edit", "summary", "title", "again", "other turn"])
        agent, head, messages = rng.choice(histories) if histories else ("", HEAD, say("task"))
        match kind:
            case "new":
                agent, head, messages = rng.choice(["", "", "a1", "a2"]), rng.choice([HEAD, Head("sub", HEAD.tools)]), say(f"task {n}")
            case "on":
                messages = [*messages, *say(f"turn {n}")]
            case "edit":
                messages = [*messages[: 2 * rng.randrange(len(messages) // 2 + 1)], *say(f"edited {n}")]
            case "summary":
                messages = [*messages, *say(COMPACT)]
            case "title":
                agent, head, messages = "", Head("Write a title."), [*messages, *say("title?")]
            case "other turn" if len(messages) > 1:
                messages = [*messages[:-1], {"role": "assistant", "content": f"never said {n}"}, *say("what?")]
        if messages[-1]["role"] == "assistant":
            messages = [*messages, *say("?")]
        replies: list[str | Exception] = ["answer", "calling " + tool_call("bash", n=n), "", EngineFault("broke")]
        reply = rng.choice(replies)
        if isinstance(reply, Exception):
            made.engine.replies.append(reply)
            with contextlib.suppress(CallFailed):
                await finished(made.recorder.open(0, request(messages, head=head, agent=agent)))
            made.engine.replies.clear()
        else:
            told = await ask(made, messages, reply, head=head, agent=agent)
            made.engine.replies.clear()
            histories.append((agent, head, result(told) if "tool_call" in reply else told))
        past, live = read_past(made.store.forest, 0), made.recorder._live[0]
        assert past.history == live.history, (n, kind)
        assert (past.calls, past.tokens, past.lost) == (live.calls, live.tokens, 0)
        assert past.delivered.keys() == live.delivered.keys()
        assert {node: tokens.tolist() for node, (_, tokens) in past.nodes.items()} == {
            node: tokens.tolist() for node, (_, tokens) in live.nodes.items()
        }
        held = MessageIndex()
        for place in past.places:
            held.restore(0, place)
        assert held._own == {0: made.recorder._index._own.get(0, {})} or not past.places
