"""Calls whose answers the library reads: recorded as they were sampled, delivered as they were read, matched as they come back."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from gyre_hpc.gateway.calls import Ended
from gyre_hpc.gateway.text.library import Library, LibraryParser, Parsed
from gyre_hpc.gateway.text.parsers import Parsers, make_parsers
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.thoughts import Thoughts
from gyre_hpc.gateway.text.toolcalls import PieceParser, TextPiece, ToolPiece
from tests.gateway.fakes import Bench, bench
from tests.gateway.test_recorder import ask, finished, request, result, say

CODER = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


class FakeLibrary:
    """Fake of vLLM's parsers: `call NAME` on a line of its own is a call; "break" breaks it. Notes in which thread it was asked."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def start(self, prefix: str, tools: Sequence[Mapping[str, Any]], thinking: bool, thoughts: bool) -> PieceParser:
        assert [tool["name"] for tool in tools] == ["bash"]
        return LibraryParser(prefix, self.read, Thoughts(thinking, thoughts), "text", False)

    def read(self, text: str) -> Parsed:
        self.threads.append(threading.current_thread())
        if "break" in text:
            raise RuntimeError("of a parser")
        before, found, name = text.partition("<call ")
        return Parsed("", text, before, ((name.rstrip(">"), '{"a": 1}'),) if found else ())


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


async def test_a_conversation_by_the_library(made: Bench) -> None:
    library = FakeLibrary()
    made.recorder._parsers = Parsers(True, cast(Library, library))
    history = await ask(made, say("go"), "I look.\n<call bash>")
    assert [block["type"] for block in history[-1]["content"]] == ["text", "tool_use"]
    history = await ask(made, result(history), "<think>so</think>Now break <it")
    assert history[-1]["content"] == [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Now break <it"}]
    await ask(made, [*history, *say("again")], "done")
    assert all(thread is not threading.main_thread() for thread in library.threads)
    tree = made.tree()
    assert [tree.tokens_of([call.sampled]).tolist() for call in tree.calls.values()] == made.engine.said
    assert [call.difference for call in tree.calls.values()] == ["clean"] * 3
    assert len(tree.leaves) == 1


async def test_what_is_streamed_before_the_call_is_seen_before_it_is_read(made: Bench) -> None:
    made.recorder._parsers = Parsers(True, cast(Library, FakeLibrary()))
    made.engine.step = 12
    made.engine.replies.append("I look.\nAnd\n<call bash>")
    made.engine.gate.clear()
    stream = made.recorder.open(0, request(say("go")))
    stream.follow()
    while not any(isinstance(event, TextPiece) for event in stream.events):
        assert await stream.after(len(stream.events), 5)
    assert not any(isinstance(event, ToolPiece | Ended) for event in stream.events)
    made.engine.gate.set()
    await finished(stream)
    assert [event.id for event in stream.events if isinstance(event, ToolPiece)] == ["toolu_00000000_0"]


@pytest.mark.vllm
async def test_a_conversation_by_vllms_qwen3_coder(made: Bench, model: Path) -> None:
    made.recorder._parsers = make_parsers("qwen3_coder", "think", model)
    history = await ask(made, say("go"), "<think>hm</think>I look.\n" + CODER)
    assert history[-1]["content"][-1]["input"] == {"command": "ls"}
    history = await ask(made, result(history), "cut:Twice:\n" + CODER + CODER[:60])
    assert [block["type"] for block in history[-1]["content"]] == ["text"]
    await ask(made, [*history, *say("again")], "done")
    tree = made.tree()
    assert [tree.tokens_of([call.sampled]).tolist() for call in tree.calls.values()] == made.engine.said
    assert [call.difference for call in tree.calls.values()] == ["clean"] * 3
