"""A conversation is the same by whichever way its body was read, and so is the refusal of a body."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from blake3 import blake3

from gyre_hpc.gateway.calls import BadRequest
from gyre_hpc.gateway.dialects import anthropic, bodies, chat, responses
from gyre_hpc.gateway.dialects.bodies import Memory
from gyre_hpc.gateway.dialects.canonical import Known
from gyre_hpc.gateway.dialects.dialect import Asked, Dialect

DIALECTS: dict[str, Dialect] = {"messages": anthropic.Messages(), "chat": chat.ChatCompletions(), "responses": responses.Responses()}
NAMES = {"messages": "messages", "chat": "messages", "responses": "input"}
WORDS = ["a", "é", '"', "\\", "\n", "[", "]", "},{", '{"role":"user"}', "messages", "input", "\u2028", " ", "x" * 30]
Item = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_body_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL", 0)


class Harness:
    """Makes histories as harnesses do, grown and edited at random."""

    def __init__(self, dialect: str, seed: int) -> None:
        self.dialect = dialect
        self.rng = random.Random(seed)
        self.items: list[Item] = [*self._front(), self._user()]
        self.calls = 0
        self.system = self.text()

    def text(self) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(1, 9)))

    def grow(self) -> None:
        """An answer with a call and its result; now and then a question."""
        self.calls += 1
        self.items += {"messages": self._messages, "chat": self._chat, "responses": self._responses}[self.dialect](f"call_{self.calls}")
        if self.rng.random() < 0.3:
            self.items.append(self._user())

    def edit(self) -> None:
        """What compaction, retries, cache marks and odd clients do to a history."""
        rng, items = self.rng, self.items
        at = rng.randrange(len(items))
        kind = rng.randrange(8)
        if kind == 0:
            del items[at + 1 :]
            items.append(self._user())
        elif kind == 1 and len(items) > 2:
            del items[at]
        elif kind == 2:
            items.insert(at, rng.choice(items))
        elif kind == 3:
            items[at] = {**items[at], "cache_control": {"type": self.text()}}
        elif kind == 4:
            items[at] = dict(sorted(items[at].items(), reverse=True))
        elif kind == 5:
            items.append({"role": "user", "content": rng.choice(["", " ", []])})
        elif kind == 6:
            items.insert(
                at, {"role": "system" if self.dialect == "messages" else rng.choice(["system", "developer"]), "content": self.text()}
            )
        else:
            self.system = self.text()

    def body(self) -> bytes:
        """The request; its keys in any order, spaced in any way, sometimes odd."""
        rng = self.rng
        system = {"messages": "system", "chat": "user", "responses": "instructions"}[self.dialect]
        name = NAMES[self.dialect]
        fields: dict[str, Any] = {"model": "m", name: self.items, system: self.system, "max_tokens": 9, "stream": True}
        if rng.random() < 0.2:
            fields = {key: fields[key] for key in rng.sample(list(fields), len(fields))}
        raw = orjson.dumps(fields, option=orjson.OPT_INDENT_2 if rng.random() < 0.1 else 0)
        if rng.random() < 0.1:
            raw = self._broken(raw, name)
        return raw

    def _broken(self, raw: bytes, name: str) -> bytes:
        rng = self.rng
        twice = orjson.dumps({name: rng.choice([[], [self._user()], "x", [7], self.items[:1]])})[1:]
        return rng.choice([
            raw[:-1] + b"," + twice,
            b"{" + twice[:-1] + b"," + raw[1:],
            raw[: rng.randrange(len(raw))],
            raw[:-2],
            raw + b"]",
            raw.replace(b"]", b"", 1),
            raw.replace(b'"role"', b'"r\\u006fle"'),
            raw.replace(b'"%b"' % name.encode(), b'"%b\\u0073"' % name.encode()[:-1]),
            raw.replace(b"user", b"nobody", 1),
            raw.replace(b"a", b"\xff", 1),
        ])  # fmt: skip

    def _front(self) -> list[Item]:
        return [{"role": "system", "content": self.text()} for _ in range(self.rng.randrange(3))]

    def _user(self) -> Item:
        if self.dialect == "responses":
            return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.text()}]}
        return {"role": "user", "content": self.text()}

    def _messages(self, call: str) -> list[Item]:
        used = {"type": "tool_use", "id": call, "name": "t", "input": {"b": 1.0, "a": self.text()}}
        said = [{"type": "text", "text": self.text()}, {"type": "thinking", "thinking": self.text()}]
        result = {"type": "tool_result", "tool_use_id": call, "content": self.text()}
        return [{"role": "assistant", "content": [*said, used]}, {"role": "user", "content": [result]}]

    def _chat(self, call: str) -> list[Item]:
        function = {"name": "t", "arguments": orjson.dumps({"a": self.text()}).decode()}
        used = [{"id": call, "type": "function", "function": function}]
        return [
            {"role": "assistant", "content": self.text(), "tool_calls": used},
            {"role": "tool", "tool_call_id": call, "content": self.text()},
        ]

    def _responses(self, call: str) -> list[Item]:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.text()}]}
        used = {"type": "function_call", "call_id": call, "name": "t", "arguments": orjson.dumps({"a": self.text()}).decode()}
        items: list[Item] = [
            {"type": "reasoning", "summary": []},
            said,
            used,
            {"type": "function_call_output", "call_id": call, "output": self.text()},
        ]
        return items[self.rng.randrange(3) :]


def told(ask: Callable[[], Asked]) -> Any:
    """All that a request means, or how it is refused."""
    try:
        asked = ask()
    except BadRequest as error:
        return str(error)
    call = asked.call
    read = call.conversation
    whole = read if not read.known or read.whole is None else read.whole()
    assert [turn.key for turn in read.messages] == [turn.key for turn in whole.messages]
    assert [turn.role for turn in read.messages] == [turn.role for turn in whole.messages]
    assert read.digests == whole.digests
    assert [turn.blocks for turn in read.messages[read.known :]] == [turn.blocks for turn in whole.messages[read.known :]]
    assert not read.messages or not isinstance(read.messages[-1], Known)
    return read.head, [turn.blocks for turn in whole.messages], whole.digests, call.digest, call.max_tokens, asked.stream


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("seed", range(12))
def test_every_way_of_reading_reads_the_same(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect, harness, memory = DIALECTS[name], Harness(name, seed), Memory()
    ways = {"_from_snapshot": 0, "_from_items": 0}

    def counted(way: str) -> None:
        real = getattr(bodies, way)

        def count(*arguments: Any) -> Any:
            found = real(*arguments)
            ways[way] += found is not None
            return found

        monkeypatch.setattr(bodies, way, count)

    counted("_from_snapshot")
    counted("_from_items")
    for _ in range(60):
        for _ in range(harness.rng.randrange(3)):
            harness.grow()
        if harness.rng.random() < 0.3:
            harness.edit()
        if harness.rng.random() < 0.4:
            memory.last = None  # hashed, then
        raw = harness.body()
        assert told(lambda raw=raw: dialect.ask(raw, {}, "m", memory)) == told(lambda raw=raw: dialect.ask(raw, {}, "m"))  # type: ignore[misc]
    assert min(ways.values()) >= 5, f"each way was taken: {ways}"


def grown(turns: int) -> tuple[Harness, Memory]:
    harness, memory = Harness("messages", 1), Memory()
    for _ in range(turns):
        harness.grow()
    anthropic.Messages().ask(front(harness), {}, "m", memory)
    harness.grow()
    return harness, memory


def front(harness: Harness, **first: Any) -> bytes:
    return orjson.dumps({**first, "messages": harness.items, "max_tokens": 9, "system": harness.system})


def test_a_body_that_goes_on_where_the_last_one_ended_is_read_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, memory = grown(20)
    read: list[int] = []
    loads = orjson.loads

    def watched(data: bytes) -> Any:
        read.append(len(data))
        return loads(data)

    monkeypatch.setattr(orjson, "loads", watched)
    raw = front(harness)
    conversation = anthropic.Messages().ask(raw, {}, "m", memory).call.conversation
    assert sum(read) < len(raw) / 3
    assert conversation.known > 35
    read.clear()
    harness.grow()
    raw = front(harness, metadata="in front")
    conversation = anthropic.Messages().ask(raw, {}, "m", memory).call.conversation
    assert sum(read) < len(raw) / 3, "other bytes in front: item by item"
    assert conversation.known > 35


def test_a_list_that_comes_twice_is_not_taken_for_the_known_one() -> None:
    """The last one counts, as JSON readers have it; it can't hold the mark, which nobody knows."""
    harness, memory = grown(10)
    raw = front(harness)[:-1] + b',"messages":[{"role":"user","content":"only this"}]}'
    (turn,) = anthropic.Messages().ask(raw, {}, "m", memory).call.conversation.messages
    assert turn.text == "only this"


def test_a_known_turn_has_no_text() -> None:
    harness, memory = grown(10)
    conversation = anthropic.Messages().ask(front(harness), {}, "m", memory).call.conversation
    with pytest.raises(RuntimeError, match="whole"):
        _ = conversation.messages[0].blocks
    assert conversation.whole is not None
    assert conversation.whole().messages[0].blocks[0]["text"] == harness.items[0]["content"]


def test_a_snapshot_that_was_used_is_not_the_next_to_go() -> None:
    harness, memory = grown(5)
    anthropic.Messages().ask(front(harness), {}, "m", memory)
    first, raw = memory.snapshots[0], front(harness)
    aside = raw[: first.end] + b',{"role":"user","content":"aside"}' + raw[raw.rindex(b'],"max_tokens"') :]
    for _ in range(2):
        conversation = anthropic.Messages().ask(aside, {}, "m", memory).call.conversation
        assert conversation.known == len(first.turns)
        assert memory.snapshots[-1] is first


def test_a_change_far_in_front_is_seen_by_comparing_as_by_hashing() -> None:
    harness, memory = grown(20)
    assert memory.last is not None
    harness.items[7] = {**harness.items[7], "content": "changed"}
    raw = front(harness)
    assert all(snapshot.end > raw.index(b'"changed"') for snapshot, _ in memory.last.marks)
    assert not any(snapshot.digest == blake3(raw[: snapshot.end]).digest() for snapshot, _ in memory.last.marks)
    for kept in (memory.last, None):
        memory.last = kept
        assert told(lambda: anthropic.Messages().ask(raw, {}, "m", memory)) == told(lambda: anthropic.Messages().ask(raw, {}, "m"))


def test_the_memory_is_bounded_and_holds_no_text() -> None:
    harness, memory = grown(2)
    for _ in range(60):
        harness.grow()
        anthropic.Messages().ask(front(harness), {}, "m", memory)
    assert len(memory.snapshots) <= bodies.SNAPSHOTS
    assert len(memory.items) <= len(harness.items)
    assert memory.last is not None
    assert memory.last.raw == front(harness), "of bodies only the last one"
    assert all(isinstance(turn, Known) for turn in memory.items.values())
    other = Harness("chat", 2)
    chat.ChatCompletions().ask(orjson.dumps({"messages": other.items}), {}, "m", memory)
    assert {kind for kind, _ in memory.items} <= {("/v1/messages", "generic"), ("/v1/chat/completions", "generic")}
