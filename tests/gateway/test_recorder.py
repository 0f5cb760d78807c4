"""What is on the disk after a call is what was sampled, in the right place of the tree, before anybody saw it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from gyre_hpc.engines.protocol import EngineFault, GenerateRequest, TokenChunk
from gyre_hpc.gateway import entries
from gyre_hpc.gateway.calls import BadRequest, CallFailed, CallStream, Ended, Spent, Started
from gyre_hpc.gateway.dialects.canonical import Conversation, Head, normalise_messages
from gyre_hpc.gateway.notes import NOTED_TOOLS
from gyre_hpc.gateway.recorder import RecorderSettings
from gyre_hpc.gateway.request import CallRequest
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.toolcalls import ToolCallParser, ToolPiece, blocks_of
from gyre_hpc.harness.texts import COMPACT, compacted_prompt
from tests.gateway.fakes import Bench, bench, tool_call
from trees.records import Execution, Fate, NodeKind, Role
from trees.rules import NOTE_BYTES

HEAD = Head("Do it.", ({"name": "bash", "description": "", "input_schema": {"type": "object"}},))
Messages = list[dict[str, Any]]


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


def request(messages: Messages, head: Head = HEAD, agent: str = "", max_tokens: int = 500) -> CallRequest:
    digest = blake3(repr((messages, head, agent, max_tokens)).encode()).digest(16)
    return CallRequest(Conversation(head, normalise_messages(messages)), max_tokens, agent, digest)


async def finished(stream: CallStream) -> CallStream:
    stream.follow()
    seen = 0
    while not stream.done:
        seen += len(await asyncio.wait_for(stream.after(seen, 5), 6))
    if stream.error is not None:
        raise stream.error
    stream.leave()
    return stream


async def ask(made: Bench, messages: Messages, reply: str = "done", execution: int = 0, **more: Any) -> Messages:
    """One call; the history with the answer as a JavaScript harness would send it back."""
    made.engine.replies.append(reply)
    stream = await finished(made.recorder.open(execution, request(messages, **more)))
    blocks = list(blocks_of(e for e in stream.events if not isinstance(e, Started | Ended)))
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = dict(sorted(json.loads(json.dumps(block["input"])).items(), reverse=True))
    return [*messages, {"role": "assistant", "content": blocks}]


def result(history: Messages, output: str = "ok") -> Messages:
    """The history with a result for each tool call of its last turn."""
    used = [block["id"] for block in history[-1]["content"] if block["type"] == "tool_use"]
    return [*history, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": output} for i in used]}]


def say(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def test_a_conversation_is_one_line_and_its_tokens_are_those_of_the_engine(made: Bench) -> None:
    """Arguments come back with other key order and 2.0 as 2; content toggles between string and blocks. No fork, no re-tokenising."""
    history = await ask(
        made, say("go"), "Look.\n" + '<tool_call>{"name": "bash",  "arguments": {"a": 2.0, "b": {"y": 1, "x": []}}}</tool_call>'
    )
    history = result(history)
    history[0]["content"] = [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]
    history[1]["content"][1]["input"]["a"] = 2
    history = result(await ask(made, history, tool_call("bash", command="ls")))
    await ask(made, history, "Fine.")
    tree = made.tree()
    assert [call.difference for call in tree.calls.values()] == ["clean"] * 3
    assert [call.fate for call in tree.calls.values()] == [Fate.DELIVERED] * 3
    assert len(tree.leaves) == 1
    path = tree.path(tree.leaves[0])
    assert [tree.nodes[n].kind for n in path] == [NodeKind.CONTEXT, *[NodeKind.CONTEXT, NodeKind.SAMPLED] * 3]
    for call, asked, spoken in zip(tree.calls.values(), made.engine.seen, made.engine.said, strict=True):
        assert tree.tokens_of(tree.path(call.prompt)).tolist() == asked.prompt
        assert tree.tokens_of([call.sampled]).tolist() == spoken
    columns = tree.columns
    assert columns is not None
    sampled = ~np.isnan(columns.logprobs)
    assert np.array_equal(columns.versions[sampled], np.full(sampled.sum(), 3))
    assert np.allclose(columns.logprobs[sampled], [-(t % 7) / 8 for t in columns.tokens[sampled]])


def random_json(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value with what JavaScript writes differently: whole floats, big integers, odd strings, nested keys."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 6:
        return [
            None,
            rng.random() < 0.5,
            float(rng.randrange(2000)),
            rng.randrange(10**20),
            rng.gauss(0, 1),
            'é\u2028\n"{' * rng.randrange(3),
        ][kind]
    if kind == 6:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {f"k{rng.randrange(99)}": random_json(rng, depth + 1) for _ in range(rng.randrange(4))}


def as_javascript(value: Any, rng: random.Random) -> Any:
    """The value as `JSON.parse` and `JSON.stringify` leave it, keys in another order."""
    if isinstance(value, dict):
        return {key: as_javascript(value[key], rng) for key in rng.sample(list(value), len(value))}
    if isinstance(value, list):
        return [as_javascript(item, rng) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
    return value


@pytest.mark.parametrize("seed", range(3))
async def test_no_false_fork_however_a_harness_spells_the_history(made: Bench, seed: int) -> None:
    """25 turns of random tool calls; before each request every old message is written anew, as the clients of the design note do."""
    rng = random.Random(seed)
    history = say("go")
    for turn in range(25):
        arguments = {"command": "x", **{f"a{i}": random_json(rng) for i in range(rng.randrange(4))}}
        texts = rng.choice([("", ""), ("Look.\n", ""), ("", "\nAfter."), ("<think>\nhm\n</think>\n\n", " tail "), (" \n", "\n\n")])
        made.engine.replies.append(f"{texts[0]}{tool_call('bash', **arguments)}{texts[1]}")
        stream = await finished(made.recorder.open(0, request(history)))
        blocks = list(blocks_of(e for e in stream.events if not isinstance(e, Started | Ended)))
        history = result([*history, {"role": "assistant", "content": blocks}], f"out {turn}")
        history = [respelled(message, rng) for message in history]
    tree = made.tree()
    assert {call.difference for call in tree.calls.values()} == {"clean"}
    assert len(tree.leaves) == 1
    assert [tree.tokens_of([call.sampled]).tolist() for call in tree.calls.values()] == made.engine.said


def respelled(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same message in another spelling."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": rng.choice([content, [{"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}]])}
    blocks = [{**block, "input": as_javascript(block["input"], rng)} if block["type"] == "tool_use" else dict(block) for block in content]
    if message["role"] == "assistant":
        blocks = [block for block in blocks if block["type"] != "thinking" or rng.random() < 0.5]
        if rng.random() < 0.5:
            blocks.sort(key=lambda block: block["type"] == "tool_use")
        if rng.random() < 0.3:
            blocks.append({"type": "text", "text": " "})
    for block in blocks:
        if block["type"] == "tool_result" and isinstance(block["content"], str) and rng.random() < 0.5:
            block["content"] = [{"type": "text", "text": block["content"]}]
    if len(blocks) == 1 and blocks[0]["type"] == "text" and rng.random() < 0.5:
        return {**message, "content": blocks[0]["text"]}
    return {**message, "content": blocks}


async def test_stored_tokens_equal_the_whole_conversation_rendered(made: Bench, renderer: TurnRenderer) -> None:
    """With canonical spelling from the policy, the path is token by token what the template makes of the history at the end."""
    history = result(await ask(made, say("go"), tool_call("bash", command="ls")), "a b")
    history = [*await ask(made, history, "Then."), {"role": "user", "content": "more"}]
    await ask(made, history)
    tree = made.tree()
    last = tree.calls[max(tree.calls)]
    assert tree.tokens_of(tree.path(last.prompt)).tolist() == renderer.root(Conversation(HEAD, normalise_messages(history)))


async def test_a_turn_cut_by_max_tokens_is_closed_by_context(made: Bench, renderer: TurnRenderer) -> None:
    made.engine.replies.append("long answer")
    stream = await finished(made.recorder.open(0, request(say("go"), max_tokens=4)))
    assert stream.events[-1] == Ended("max_tokens", 4)
    await ask(made, [*say("go"), {"role": "assistant", "content": "long"}, *say("go on")])
    tree = made.tree()
    first, second = tree.calls.values()
    assert (first.finish, second.difference) == ("length", "clean")
    closing = next(n for n in tree.nodes.values() if n.parent == first.sampled)
    assert closing.kind is NodeKind.CONTEXT
    assert tree.tokens_of([closing.node])[0] == renderer.turn_end
    assert tree.tokens_of([first.sampled]).tolist() == renderer.tokenizer.encode("long").ids


async def test_executions_of_a_group_share_the_prompt(made: Bench) -> None:
    for execution in range(3):
        await ask(made, say("same task"), f"answer {execution}", execution)
    await ask(made, say("other task"), "x", 0)
    trees = [made.tree(e) for e in range(3)]
    prompts = {next(iter(tree.calls.values())).prompt for tree in trees}
    assert len(prompts) == 1
    roots = {node.node for tree in trees for node in tree.nodes.values() if node.parent < 0}
    assert len(roots) == 1


async def test_a_retry_in_flight_is_coalesced_and_afterwards_replayed(made: Bench) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("once")
    first = made.recorder.open(0, request(say("go")))
    assert made.recorder.open(0, request(say("go"))) is first
    made.engine.gate.set()
    await finished(first)
    again = await finished(made.recorder.open(0, request(say("go"))))
    assert again.events == first.events
    assert len(made.engine.seen) == 1
    assert made.recorder.usage(0) == (1, 5)
    assert len(made.tree().calls) == 1


async def test_the_same_body_from_another_execution_or_agent_is_another_call(made: Bench) -> None:
    await ask(made, say("go"))
    await ask(made, say("go"), execution=1)
    await ask(made, say("go"), agent="a1")
    assert len(made.engine.seen) == 3


async def test_leaving_cancels_the_engine_and_keeps_the_tokens(made: Bench) -> None:
    made.engine.gate.clear()
    made.engine.replies += ["abcdefgh", "second try"]
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    await stream.after(1, 5)
    stream.leave()
    made.engine.gate.set()
    retry = await finished(made.recorder.open(0, request(say("go"))))
    assert retry is not stream
    assert made.engine.cancelled == 1
    tree = made.tree()
    first, second = tree.calls.values()
    assert (first.fate, first.finish) == (Fate.CANCELLED, "cancelled")
    assert tree.tokens_of([first.sampled]).tolist() == made.engine.said[0][:3]
    assert (second.fate, second.difference) == (Fate.DELIVERED, "retry")
    assert first.prompt == second.prompt
    assert not tree.incomplete


async def test_an_engine_fault_is_broken_and_the_retry_is_a_new_call(made: Bench) -> None:
    made.engine.replies += [EngineFault("gone"), "fine"]
    with pytest.raises(CallFailed, match="gone"):
        await finished(made.recorder.open(0, request(say("go"))))
    await finished(made.recorder.open(0, request(say("go"))))
    tree = made.tree()
    assert [call.fate for call in tree.calls.values()] == [Fate.BROKEN, Fate.DELIVERED]
    assert [tree.is_target(call.sampled) for call in tree.calls.values()] == [False, True]


async def test_an_answer_that_cannot_be_read_is_recorded_as_broken(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: ToolCallParser, cut: bool = False) -> list[Any]:
        raise RuntimeError("of a parser")

    with monkeypatch.context() as patched:
        patched.setattr(ToolCallParser, "finish", failing)
        with pytest.raises(CallFailed, match="of a parser"):
            await ask(made, say("go"), "one")
    assert made.recorder.faulted(0)
    await ask(made, say("go"), "two")
    assert [call.fate for call in made.tree().calls.values()] == [Fate.BROKEN, Fate.DELIVERED]


async def test_an_answer_without_a_token_is_no_answer_to_a_retry(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([], [], [], "stop")

    with monkeypatch.context() as patched:
        patched.setattr(made.engine, "generate", silent)
        stream = await finished(made.recorder.open(0, request(say("go"))))
    assert [type(event) for event in stream.events] == [Started, Ended]
    await ask(made, say("go"), "yes")
    assert len(made.engine.seen) == 1
    assert [call.sampled >= 0 for call in made.tree().calls.values()] == [False, True]


async def test_an_answer_with_very_many_calls_is_recorded(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = json.dumps([f"toolu_{1 << 60:08x}_{n}" for n in range(NOTED_TOOLS)])
    assert len(longest) < NOTE_BYTES - 1000
    monkeypatch.setattr(entries, "NOTED_TOOLS", 2)
    history = await ask(made, say("go"), tool_call("bash") * 3)
    assert len(made.recorder._live[0].history.tool_ids) == 2
    await ask(made, result(history))
    assert [call.difference for call in made.tree().calls.values()] == ["clean", "clean"]


async def test_durable_before_visible(made: Bench) -> None:
    """When the first tool call, or the end, is seen, another process already reads the call's end from the disk."""
    made.engine.replies.append("text " + tool_call("bash", command="ls") + " tail")
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    seen, checked = 0, False
    while not stream.done:
        events = await stream.after(seen, 5)
        seen += len(events)
        assert made.tree().calls  # the intent comes before anything
        if any(isinstance(event, ToolPiece | Ended) for event in events):
            assert next(iter(made.tree().calls.values())).fate is Fate.DELIVERED
            checked = True
    assert checked


async def test_intent_comes_before_the_engine_is_asked(made: Bench) -> None:
    made.engine.gate.clear()
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    await stream.after(0, 5)
    assert made.tree().incomplete
    made.engine.gate.set()
    await finished(stream)
    assert not made.tree().incomplete


async def test_compaction_sub_agent_and_roles(made: Bench) -> None:
    """The way the bundled harness does it: sub-agent first, the main conversation, a summary of it, and a new start from that."""
    helper = Head("Help.", HEAD.tools)
    history = result(await ask(made, say("part"), tool_call("bash", command="x"), head=helper, agent="a1"))
    await ask(made, history, "done that", head=helper, agent="a1")
    history = result(await ask(made, say("task"), tool_call("bash", command="y")))
    await ask(made, [*history, *say(COMPACT)], "the first")
    fresh = say(compacted_prompt("task", "the first"))
    history = result(await ask(made, fresh, tool_call("bash", command="z")))
    await ask(made, history, "Finished.")
    calls = list(made.tree().calls.values())
    assert [call.role for call in calls] == [Role.SUB_AGENT] * 2 + [Role.MAIN, Role.MAIN_SUMMARY, Role.MAIN, Role.MAIN]
    assert [call.difference for call in calls] == ["sub-agent", "clean", "clean", "clean", "compaction", "clean"]
    tree = made.tree()
    assert sorted(tree.role_of(leaf) for leaf in tree.leaves) == [Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT]


async def test_an_edited_message_forks_at_the_deepest_common_turn(made: Bench) -> None:
    history = [*await ask(made, say("go"), "one"), *say("next")]
    await ask(made, history, "two")
    await ask(made, [*history[:-1], *say("other")], "three")
    tree = made.tree()
    first, second, third = tree.calls.values()
    assert third.difference == "edit"
    assert tree.nodes[second.prompt].parent == tree.nodes[third.prompt].parent == first.sampled


async def test_forks_that_nothing_explains_are_told_and_counted(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of ours in an unknown form: a warning for each of the first, the record has all. What a rule explains makes none."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(made.recorder._entries, "_on_fork", told.append)
    monkeypatch.setattr(entries, "WARNINGS", 2)
    history = await ask(made, [*await ask(made, say("go"), "Yes?"), *say("look")], tool_call("bash", command="ls"))
    await ask(made, result(history))
    await ask(made, [*history[:2], *say("look there"), *result(history)[3:]])
    assert told == []
    for n in range(3):
        history[-1]["content"][-1]["input"] = {"raw": f"ls {n}"}
        await ask(made, result(history))
    calls = sorted(made.tree().calls.items())
    assert [call.difference for _, call in calls] == ["clean", "clean", "clean", "edit", "drift", "drift", "drift"]
    assert told == [{"execution": 0, "call": call, "difference": "drift", "messages": 2} for call, _ in calls[4:6]]


async def test_an_empty_answer_may_vanish_from_the_history(made: Bench) -> None:
    await ask(made, say("go"), "")
    await ask(made, [*say("go"), *say("say something")], "yes")
    tree = made.tree()
    first, second = tree.calls.values()
    assert tree.tokens_of([first.sampled]).tolist() == [made.renderer.turn_end]
    assert tree.nodes[second.prompt].parent == first.sampled
    assert second.difference == "clean"


async def test_thoughts_are_restored_though_the_harness_drops_them(made: Bench) -> None:
    history = await ask(made, say("go"), "<think>\nhm\n</think>\n\nyes")
    kept = [block for block in history[-1]["content"] if block["type"] != "thinking"]
    await ask(made, [*say("go"), {"role": "assistant", "content": kept}, *say("next")], "ok")
    assert len(made.tree().leaves) == 1


async def test_seeds_differ_by_call_and_execution_and_repeat(tmp_path: Path, renderer: TurnRenderer) -> None:
    async def seeds(folder: str, seed: int) -> list[int]:
        async with bench(tmp_path / folder, renderer, RecorderSettings(seed=seed, window=4096)) as b:
            await ask(b, say("go"))
            await ask(b, say("other"))
            await ask(b, say("go"), execution=1)
            return [r.sampling.seed for r in b.engine.seen]

    one, same, other = await seeds("a", 1), await seeds("b", 1), await seeds("c", 2)
    assert one == same
    assert len({*one, *other}) == 6
    assert all(0 <= seed < 2**63 for seed in one)


async def test_limits(tmp_path: Path, renderer: TurnRenderer) -> None:
    async with bench(tmp_path / "t", renderer, RecorderSettings(seed=0, window=200, max_calls=3, temperature=0.5)) as b:
        await ask(b, say("go"), max_tokens=1000)
        sampling = b.engine.seen[0].sampling
        assert sampling.max_tokens == 200 - len(b.engine.seen[0].prompt)
        assert (sampling.temperature, sampling.stop) == (0.5, renderer.stop_ids)
        with pytest.raises(BadRequest, match=r"prompt is too long: \d+ tokens > 199 maximum"):
            await ask(b, say("x" * 300))
        await ask(b, say("b"))
        await ask(b, say("c"))
        with pytest.raises(BadRequest, match="made 3 calls"):
            await ask(b, say("d"))
        assert await b.recorder.count(0, Conversation(HEAD, normalise_messages(say("go")))) == len(b.engine.seen[0].prompt)
        assert len(b.tree().calls) == 3


async def test_an_execution_samples_no_more_than_its_tokens(tmp_path: Path, renderer: TurnRenderer) -> None:
    """The answer that reaches the cap is cut there; what is asked afterwards is refused."""
    async with bench(tmp_path / "t", renderer, RecorderSettings(seed=0, window=400, max_tokens=10)) as b:
        await ask(b, say("go"), "four")  # five tokens: the end of the turn is one
        await ask(b, say("on"), "123456789")
        assert [request.sampling.max_tokens for request in b.engine.seen] == [10, 5]
        with pytest.raises(Spent, match="sampled 10 tokens, which is all it may sample"):
            await ask(b, say("more"))
        await ask(b, say("go"), execution=1)
        tree = b.tree()
        assert [call.finish for call in tree.calls.values()] == ["stop", "length"]
        assert sum(tree.nodes[call.sampled].length for call in tree.calls.values()) == 10


async def test_an_answer_that_said_nothing_is_superseded_when_it_is_asked_for_again(made: Bench) -> None:
    """As qwen-code does, eight times: a replay would be refused each time."""
    for reply in ("", "<think>hm</think>", "yes", "never"):
        await ask(made, say("go"), reply)
    tree = made.tree()
    assert [call.fate for call in tree.calls.values()] == [Fate.SUPERSEDED, Fate.SUPERSEDED, Fate.DELIVERED]
    assert [call.difference for call in tree.calls.values()] == ["clean", "retry", "retry"]
    assert len({call.prompt for call in tree.calls.values()}) == 1  # the prompt is there once
    assert [tree.is_target(call.sampled) for call in tree.calls.values()] == [False, False, True]
    made.engine.replies.clear()
    history = await ask(made, say("and"), "")
    await ask(made, [*history, *say("more")], "fine")
    assert made.tree().calls[3].fate is Fate.DELIVERED  # it was not asked for again


async def test_a_conversation_may_end_with_a_turn_of_the_assistant(made: Bench, renderer: TurnRenderer) -> None:
    """As qwen-code's does after a compaction: the policy takes the next turn. Its own last turn is not tokenised anew."""
    history = await ask(made, say("go"), "yes")
    await ask(made, history, "and")
    await ask(made, [*say("so far"), {"role": "assistant", "content": "Got it."}], "next")
    first, second, third = (list(request.prompt) for request in made.engine.seen)
    again = renderer.tokenizer.encode("\n<|im_start|>assistant\n", add_special_tokens=False).ids
    assert second == [*first, *made.engine.said[0], *again]
    assert renderer.text(third).endswith("so far<|im_end|>\n<|im_start|>assistant\nGot it.<|im_end|>\n<|im_start|>assistant\n")
    tree = made.tree()
    assert tree.nodes[tree.calls[1].prompt].parent == tree.calls[0].sampled
    assert [call.difference for call in tree.calls.values()] == ["clean", "clean", "edit"]


async def test_finish_cancels_records_and_forgets(made: Bench) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("abcdef")
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    await stream.after(1, 5)
    assert made.recorder.in_flight == 1
    assert await made.recorder.finish(0) == (1, 3)
    with pytest.raises(CallFailed, match="over"):
        await finished(stream)
    assert made.recorder.in_flight == 0
    assert next(iter(made.tree().calls.values())).fate is Fate.CANCELLED


async def test_the_end_of_an_execution_that_is_not_there_is_not_that_of_a_later_one(made: Bench) -> None:
    assert await made.recorder.finish(3) == (0, 0)
    made.store.append(Execution(made.store.allocate_execution(), 0, 0, 1))
    await ask(made, say("go"), execution=3)
    await made.recorder.finish(3)
    with pytest.raises(CallFailed, match="over"):
        made.recorder.open(3, request(say("go")))


async def test_calls_that_run_together_share_commits(made: Bench) -> None:
    made.engine.gate.clear()
    streams = [made.recorder.open(e, request(say(f"task {i}"))) for i in range(30) for e in range(3)]
    await asyncio.gather(*(stream.after(0, 5) for stream in streams))
    made.engine.gate.set()
    await asyncio.gather(*(finished(stream) for stream in streams))
    assert made.recorder.committer.commits < 60
    assert len(made.tree(2).calls) == 30


async def test_a_store_that_cannot_be_written_fails_every_call(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.store, "commit", full)
    with pytest.raises(CallFailed, match="No space left"):
        await ask(made, say("go"))
    with pytest.raises(CallFailed, match="No space left"):
        await ask(made, say("later"), execution=1)
    assert [error.errno for error in made.fatal if isinstance(error, OSError)] == [28]
    assert made.engine.seen == []
    monkeypatch.undo()
