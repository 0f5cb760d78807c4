"""What one turn of a long conversation costs at the gateway: CPU time, engine and sockets excluded.

    python benchmarks/gateway_turn.py [--sizes 10000,100000,500000,700000] [--turns 6] [--profile SIZE] [--slow-tokenizer]

A conversation grows through the real dialect, recorder and store by turns of about 4,700 tokens (a reply with a tool call, and its result;
300 messages at 700K). At each size some turns with 3,500 new tokens are measured, from the request's bytes to those of the answer's
events: parse, match, render, tokenise, intent, the engine's request as JSON, tokens to text, answer, end. Three ways:
`extends`: the body goes on where the last one ended, byte for byte; `parse`: something in front of the messages changed, so that all of it
is read; `naive`: parse, render the whole conversation, tokenise it, and dump the prompt as JSON, which is what keeps no tokens.
Time is that of all threads of the process (the store's fsync thread too): the median of the turns, and the least, which other programs on
the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import os
import pstats
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from benchmarks import vocabulary
from gyre_hpc.engines.protocol import GenerateRequest, TokenChunk
from gyre_hpc.engines.vllm_engine import request_body
from gyre_hpc.gateway import anthropic
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.template import TurnRenderer
from trees.records import Execution, Group
from trees.store import StoreWriter

WINDOW = 1_000_000
GROWING, NEW, REPLY = 4_700, 3_500, 500
CHUNK = 64
"""Tokens that the engine says at a time."""
PROFILED = 20
SYSTEM = "You are an agent that works on software. "
TOOLS = 8


class Prepared:
    """Fake of the router: makes the request's JSON as the client of vLLM does, and says the next reply."""

    def __init__(self) -> None:
        self.reply: list[int] = []
        self.context = 0
        self.bytes = 0

    async def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        self.context = len(request.prompt)
        self.bytes = len(request_body(request, WINDOW, seeded=False))
        for at in range(0, len(self.reply), CHUNK):
            tokens = self.reply[at : at + CHUNK]
            yield TokenChunk(tokens, [-0.5] * len(tokens), [1] * len(tokens), "stop" if at + CHUNK >= len(self.reply) else None)


class Conversation:
    """A harness like Claude Code, which sends all of its history each time."""

    def __init__(self, renderer: TurnRenderer, text: str, *, broken: bool, seed: int) -> None:
        self._renderer = renderer
        self._text = text
        self._broken = broken
        self._rng = random.Random(seed)
        self._turns = itertools.count()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out why the build fails and repair it."}]
        properties = {name: {"type": "string", "description": "What it is about."} for name in ("command", "path", "pattern")}
        schema = {"type": "object", "properties": properties}
        self.head = {
            "system": [{"type": "text", "text": SYSTEM * 150, "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": f"Tool{i}", "description": self.piece(300), "input_schema": schema} for i in range(TOOLS)],
        }

    def piece(self, tokens: int) -> str:
        """Real text of about this many tokens."""
        size = int(tokens * 3.9)
        at = self._rng.randrange(len(self._text) - size)
        return self._text[at : at + size]

    def body(self) -> bytes:
        """The next request. `broken`: another first field each time, so that no two bodies begin alike."""
        front = {"request": f"{next(self._turns):08d}"} if self._broken else {}
        rest = {**self.head, "metadata": {"user_id": "{}"}, "max_tokens": 32000, "stream": True}
        return orjson.dumps({**front, "model": "policy", "messages": self.messages, **rest})

    def reply(self) -> list[int]:
        """What the policy says next."""
        call = orjson.dumps({"name": "Tool1", "arguments": {"path": "src/a.py", "command": self.piece(REPLY // 2)}}).decode()
        text = f"{self.piece(REPLY // 2).strip()}\n<tool_call>\n{call}\n</tool_call>"
        return [*self._renderer.tokenizer.encode(text, add_special_tokens=False).ids, self._renderer.turn_end]

    def take(self, events: bytes, tokens: int) -> None:
        """Put the answer into the history, and a result of `tokens` tokens."""
        blocks = _blocks(events)
        self.messages.append({"role": "assistant", "content": blocks})
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        self.messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": self.piece(tokens)} for i in used]}
        )


def _blocks(events: bytes) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for line in events.splitlines():
        event = orjson.loads(line[6:]) if line.startswith(b"data: ") else {}
        if event.get("type") == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = orjson.loads(block.pop("json", "{}"))
    return blocks


class Turns:
    """Carries turns out as the HTTP side does."""

    def __init__(self, recorder: Recorder, engine: Prepared, execution: int) -> None:
        self._recorder = recorder
        self._engine = engine
        self._execution = execution
        self._dialect = anthropic.Messages()

    async def turn(self, body: bytes, reply: list[int]) -> bytes:
        """Bytes in, bytes out."""
        self._engine.reply = reply
        asked = ask(self._dialect, self._recorder, self._execution, body)
        stream = self._recorder.open(self._execution, asked.call)
        stream.follow()
        parts: list[bytes] = []
        seen = 0
        while not stream.done or seen < len(stream.events):
            events = await stream.after(seen, None)
            seen += len(events)
            parts.append(asked.answer.encode(events))
        stream.leave()
        return b"".join(parts)


def ask(dialect: anthropic.Messages, recorder: Recorder, execution: int, body: bytes) -> Any:
    return dialect.ask(body, {}, "policy", recorder.memory(execution))


async def measure(
    make: Callable[[], Conversation], turns: Turns, engine: Prepared, sizes: list[int], count: int, profile: int
) -> dict[int, list[float]]:
    """CPU milliseconds of `count` turns at each size."""
    conversation, found = make(), {}
    for size in sizes:
        while engine.context < size:
            conversation.take(await turns.turn(conversation.body(), conversation.reply()), GROWING - REPLY)
        times = []
        profiler = cProfile.Profile(time.thread_time)
        for number in range(count + (PROFILED if profile == size else 0)):
            body, reply = conversation.body(), conversation.reply()
            gc.collect()
            gc.disable()
            began = time.process_time()
            if number >= count:
                profiler.enable()
            events = await turns.turn(body, reply)
            if number >= count:
                profiler.disable()
            else:
                times.append((time.process_time() - began) * 1e3)
            gc.enable()
            conversation.take(events, NEW - REPLY)
        if profile == size:
            pstats.Stats(profiler).sort_stats("cumtime").print_stats("gyre_hpc|trees|built-in|method", 45)
        found[size] = times
        print(
            f"  {engine.context:>7} tokens, body {len(body) / 1e6:.2f} MB, {len(conversation.messages)} messages: {median(times):.2f} ms",
            flush=True,
        )
    return found


def naive(renderer: TurnRenderer, make: Callable[[], Conversation], sizes: list[int]) -> dict[int, float]:
    """CPU milliseconds of reading, rendering and tokenising everything, once at each size."""
    conversation, found = make(), {}
    size = 0
    for goal in sizes:
        while size < goal:
            reply = conversation.reply()
            text = renderer.text(reply)
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.messages.append({"role": "user", "content": conversation.piece(GROWING - REPLY)})
            size += GROWING
        body = conversation.body()
        began = time.process_time()
        request = anthropic.conversation_of(orjson.loads(body))
        ids = renderer.tokenizer.encode(
            renderer._render(renderer._with_head(request.head, request.messages), request.head), add_special_tokens=False
        ).ids
        orjson.dumps({"token_ids": ids})
        found[goal] = (time.process_time() - began) * 1e3
        print(f"  {len(ids):>7} tokens: {found[goal]:.0f} ms", flush=True)
    return found


async def main(sizes: list[int], count: int, profile: int) -> None:
    """Measure all and print the table."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    where, text = vocabulary.directory(), vocabulary.corpus()
    began = time.process_time()
    renderer = TurnRenderer(where)
    print(f"{where.name}, {renderer.vocabulary:,} entries, ready in {time.process_time() - began:.1f} s of CPU")
    results = {}
    for name, broken in (("extends", False), ("parse", True)):
        print(name)
        with tempfile.TemporaryDirectory() as folder:
            store, engine = StoreWriter(Path(folder)), Prepared()
            store.append(Group(0, "task", 1, 0, 0))
            store.append(Execution(store.allocate_execution(), 0, 0, 0))
            recorder = Recorder(store, renderer, engine, RecorderSettings(seed=1, window=WINDOW), print)

            def make(broken: bool = broken) -> Conversation:
                return Conversation(renderer, text, broken=broken, seed=3)

            results[name] = await measure(make, Turns(recorder, engine, 0), engine, sizes, count, profile)
            await recorder.close()
            store.close()
    print("naive")
    slow = naive(renderer, lambda: Conversation(renderer, text, broken=False, seed=3), sizes)
    print(
        "\nCPU ms of one turn with 3,500 new tokens\n\n"
        + f"{'context':>9} {'extends':>9} {'parse':>9} {'naive':>9} {'naive/extends':>14} {'naive/parse':>12}"
    )
    for size in sizes:
        fast, full = median(results["extends"][size]), median(results["parse"][size])
        print(f"{size:>9,} {fast:>9.2f} {full:>9.2f} {slow[size]:>9.0f} {slow[size] / fast:>13.0f}x {slow[size] / full:>11.0f}x")
        print(f"{'least':>9} {min(results['extends'][size]):>9.2f} {min(results['parse'][size]):>9.2f}")
    least, most = sizes[0], sizes[-1]
    growth = {name: median(times[most]) - median(times[least]) for name, times in results.items()}
    print(f"growth from {least:,} to {most:,}: extends {growth['extends']:.2f} ms, parse {growth['parse']:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[10_000, 100_000, 500_000, 700_000])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--profile", type=int, default=0, metavar="SIZE", help="print where the time goes at this size")
    options = parser.parse_args()
    asyncio.run(main(options.sizes, options.turns, options.profile))
