"""What one turn of a long conversation costs at the gateway: CPU time, engine and sockets excluded.

    python -m benchmarks.gateway_turn [--sizes 10000,100000,500000,700000] [--turns 12] [--profile SIZE] [--quick] [--wire vllm]

Conversations grow through the real dialect, recorder and store by turns of about 4,700 tokens (a reply with a tool call, and its result;
300 messages at 700K) until the prompt of the next turn has the size that the row says (turns that stand next to each other are spread
around it, within 4 %). Measured are turns whose prompt has 3,500 tokens more than the one before, 500 of them the reply, from the request's
bytes to those of the answer's events: parse, match, render, tokenise, intent, the engine's request as JSON, the engine's answer to tokens,
tokens to text, answer, end. What the engine says is prepared beforehand, as bytes. Three ways:
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
from collections.abc import AsyncGenerator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from benchmarks import vocabulary
from gyre_hpc.engines import torch_engine, vllm_client
from gyre_hpc.engines.frames import Frames, frame
from gyre_hpc.engines.protocol import GenerateRequest, TokenChunk
from gyre_hpc.engines.streaming import Lines, sound
from gyre_hpc.engines.vllm_wire import parse_line
from gyre_hpc.gateway.dialects import anthropic
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.text.template import TurnRenderer
from trees.records import Execution, Group
from trees.store import StoreWriter

WINDOW = 1_000_000
GROWING, NEW, REPLY = 4_700, 3_500, 500
CHUNK = 64
"""Tokens that the engine says at a time."""
PROFILED, WARM = 20, 4
"""Turns that are profiled, and those before the first that is measured."""
NEAR = 0.04
SYSTEM = "You are an agent that works on software. "
TOOLS = 8


class Prepared:
    """Fake of the router: writes the request's JSON and reads the answer's bytes as an engine's client does; the bytes are prepared."""

    def __init__(self, wire: str) -> None:
        """`wire`: frames (our engine's) or vllm (its JSON)."""
        self._vllm = wire == "vllm"
        self._parts: list[bytes] = []
        self.context = 0
        self.bytes = 0

    def prepare(self, reply: list[int]) -> None:
        """What the engine says next."""
        write = _event if self._vllm else _frame
        self._parts = [write(reply[at : at + CHUNK], at + CHUNK >= len(reply)) for at in range(0, len(reply), CHUNK)]

    async def generate(self, request: GenerateRequest, execution: int) -> AsyncGenerator[TokenChunk, None]:
        self.context = len(request.prompt)
        body = vllm_client.request_body(request, WINDOW, seeded=False) if self._vllm else torch_engine.request_body(request)
        self.bytes = len(body)
        reader = Lines(lambda line: parse_line(line, 1)) if self._vllm else Frames()
        for part in self._parts:
            for chunk in reader.feed(part):
                if isinstance(chunk, TokenChunk):
                    yield sound(chunk)


def _frame(tokens: list[int], last: bool) -> bytes:
    """A frame of our engine's answer."""
    columns = (np.asarray(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), np.ones(len(tokens), np.int32))
    return frame(TokenChunk(*columns, "stop" if last else None))


def _event(tokens: list[int], last: bool) -> bytes:
    """An event of vLLM's answer."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": -0.5 - token / 1e6, "bytes": None, "top_logprobs": []} for token in tokens
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop" if last else None, "token_ids": tokens}
    spans = [{"version": "1", "start": 0, "end": len(tokens)}]
    return b"data: " + orjson.dumps({"request_id": "call", "choices": [{**choice, "weight_versions": spans}]}) + b"\n"


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
        """Real text of this many tokens, but for one or two where it is cut."""
        size = 5 * tokens
        at = self._rng.randrange(len(self._text) - size)
        ids = self._renderer._encode(self._text[at : at + size])
        return self._renderer.text(ids[:tokens])

    def body(self) -> bytes:
        """The next request. `broken`: another first field each time, so that no two bodies begin alike."""
        front = {"request": f"{next(self._turns):08d}"} if self._broken else {}
        rest = {**self.head, "metadata": {"user_id": "{}"}, "max_tokens": 32000, "stream": True}
        return orjson.dumps({**front, "model": "policy", "messages": self.messages, **rest})

    def reply(self) -> list[int]:
        """What the policy says next."""
        call = orjson.dumps({"name": "Tool1", "arguments": {"path": "src/a.py", "command": self.piece(REPLY // 2)}}).decode()
        text = f"{self.piece(REPLY // 2).strip()}\n<tool_call>\n{call}\n</tool_call>"
        return [*self._renderer._encode(text), self._renderer.turn_end]

    def answered(self, events: bytes) -> None:
        """Put the answer into the history."""
        self.messages.append({"role": "assistant", "content": _blocks(events)})

    def go_on(self, tokens: int) -> None:
        """Put a result of `tokens` tokens behind the answer's call."""
        used = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
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


async def carry_out(recorder: Recorder, execution: int, body: bytes) -> bytes:
    """One turn as the HTTP side does it: bytes in, bytes out."""
    asked = anthropic.Messages().ask(body, {}, "policy", recorder.memory(execution))
    stream = recorder.open(execution, asked.call)
    stream.follow()
    parts: list[bytes] = []
    seen = 0
    while not stream.done or seen < len(stream.events):
        events = await stream.after(seen, None)
        seen += len(events)
        parts.append(asked.answer.encode(events))
    stream.leave()
    return b"".join(parts)


class Way:
    """One way of asking: conversations that grow, and the turns of them that are measured."""

    def __init__(self, folder: Path, renderer: TurnRenderer, text: str, *, broken: bool, wire: str) -> None:
        self._renderer, self._text, self._broken = renderer, text, broken
        self._store, self._engine = StoreWriter(folder), Prepared(wire)
        self._recorder = Recorder(self._store, renderer, self._engine, RecorderSettings(seed=1, window=WINDOW), print)
        self._profiler: cProfile.Profile | None = None
        self.last = (0, 0, 0)
        """Of the last turn: tokens of its prompt, bytes of its body, messages afterwards."""

    async def close(self) -> None:
        """All turns are over."""
        await self._recorder.close()
        self._store.close()

    async def measure(self, size: int, count: int) -> list[float]:
        """CPU milliseconds of `count` turns whose prompts have `size` tokens."""
        times: list[float] = []
        while len(times) < count:
            execution = self._store.allocate_execution()
            self._store.append(Group(execution, "task", 1, 0, 0))
            self._store.append(Execution(execution, execution, 0, 0))
            conversation = Conversation(self._renderer, self._text, broken=self._broken, seed=execution + 3)
            times += await self._conversation(conversation, execution, size, count - len(times))
            await self._recorder.finish(execution)
        return times

    async def profile(self, size: int) -> None:
        """Print where the time of some more turns goes."""
        self._profiler = cProfile.Profile(time.thread_time)
        await self.measure(size, PROFILED)
        pstats.Stats(self._profiler).sort_stats("tottime").print_stats(70)
        self._profiler = None

    async def _conversation(self, conversation: Conversation, execution: int, size: int, count: int) -> list[float]:
        """Let a conversation grow until turns of it are of this size, and measure those."""
        await self._turn(conversation, execution, 0)
        fitting = min(count, 1 + int(2 * NEAR * size / NEW))
        start = size - NEW * (fitting + 1) // 2
        if start - self._engine.context < 2 * REPLY:
            raise SystemExit(f"no turn of {size} tokens: the first one of a conversation has {self._engine.context}")
        for steps in range(max(1, round((start - self._engine.context) / GROWING)), 0, -1):
            await self._turn(conversation, execution, (start - self._engine.context) // steps)
        times = []
        for _ in range(fitting):
            times.append(await self._turn(conversation, execution, NEW, measured=True))
            if abs(self._engine.context - size) > 1.5 * NEAR * size:
                raise SystemExit(f"a turn of {self._engine.context} tokens where {size} were wanted")
        return times

    async def _turn(self, conversation: Conversation, execution: int, new: int, *, measured: bool = False) -> float:
        """One turn with `new` tokens more than the one before (0: the first); its CPU milliseconds."""
        if new:
            conversation.go_on(new - REPLY)
        body = conversation.body()
        self._engine.prepare(conversation.reply())
        profiler = self._profiler if measured else None
        if measured:
            gc.collect()
        gc.disable()
        began = time.process_time()
        if profiler is not None:
            profiler.enable()
        events = await carry_out(self._recorder, execution, body)
        if profiler is not None:
            profiler.disable()
        spent = (time.process_time() - began) * 1e3
        gc.enable()
        conversation.answered(events)
        self.last = (self._engine.context, len(body), len(conversation.messages))
        return spent


def naive(renderer: TurnRenderer, text: str, sizes: list[int]) -> dict[int, float]:
    """CPU milliseconds of reading, rendering and tokenising everything, once at each size."""
    conversation, found = Conversation(renderer, text, broken=False, seed=3), {}
    size = _all(renderer, conversation.body())[1]
    for goal in sizes:
        while size < goal:
            step = min(GROWING, goal - size)
            conversation.messages.append({"role": "assistant", "content": renderer.text(conversation.reply())})
            conversation.messages.append({"role": "user", "content": conversation.piece(max(1, step - REPLY))})
            size += step
        found[goal], size = _all(renderer, conversation.body())
        print(f"  {size:>7} tokens: {found[goal]:.0f} ms", flush=True)
    return found


def _all(renderer: TurnRenderer, body: bytes) -> tuple[float, int]:
    """CPU milliseconds, and tokens of the prompt."""
    began = time.process_time()
    request = anthropic.conversation_of(orjson.loads(body))
    text = renderer._writer.whole(request.head, request.messages)
    ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
    orjson.dumps({"token_ids": ids})
    return (time.process_time() - began) * 1e3, len(ids)


async def main(sizes: list[int], count: int, profile: int, quick: bool, wire: str) -> None:
    """Measure all and print the table."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    where, text = vocabulary.directory(), vocabulary.corpus()
    began = time.process_time()
    renderer = TurnRenderer(where)
    print(f"{where.name}, {renderer.vocabulary:,} entries, ready in {time.process_time() - began:.1f} s of CPU")
    gc.freeze()  # else each collection walks all modules
    results: dict[str, dict[int, list[float]]] = {}
    for name, broken in (("extends", False), ("parse", True)):
        print(name)
        results[name] = {}
        with tempfile.TemporaryDirectory() as folder:
            way = Way(Path(folder), renderer, text, broken=broken, wire=wire)
            await way.measure(sizes[0], WARM)
            for size in sizes:
                times = results[name][size] = await way.measure(size, count)
                tokens, octets, messages = way.last
                print(f"  {tokens:>7} tokens, body {octets / 1e6:.2f} MB, {messages} messages: {median(times):.2f} ms", flush=True)
                if profile == size:
                    await way.profile(size)
            await way.close()
    slow: dict[int, float] = {}
    if not quick:
        print("naive")
        slow = naive(renderer, text, sizes)
    _print_table(results, slow)


def _print_table(results: dict[str, dict[int, list[float]]], slow: dict[int, float]) -> None:
    print(
        f"\nCPU ms of one turn with {NEW:,} new tokens\n\n{'context':>9} {'extends':>9} {'least':>7} {'parse':>9} {'least':>7} {'naive':>9}"
    )
    sizes = [*results["extends"]]
    for size in sizes:
        fast, full = results["extends"][size], results["parse"][size]
        row = f"{size:>9,} {median(fast):>9.2f} {min(fast):>7.2f} {median(full):>9.2f} {min(full):>7.2f}"
        print(row + (f" {slow[size]:>9.0f}" if size in slow else ""))
    least, most = sizes[0], sizes[-1]
    growth = {name: median(times[most]) - median(times[least]) for name, times in results.items()}
    print(f"growth from {least:,} to {most:,}: extends {growth['extends']:.2f} ms, parse {growth['parse']:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[10_000, 100_000, 500_000, 700_000])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--profile", type=int, default=0, metavar="SIZE", help="print where the time goes at this size")
    parser.add_argument("--quick", action="store_true", help="without the naive way")
    parser.add_argument("--wire", choices=("frames", "vllm"), default="frames", help="what the engine's answer is written in")
    options = parser.parse_args()
    asyncio.run(main(options.sizes, options.turns, options.profile, options.quick, options.wire))
