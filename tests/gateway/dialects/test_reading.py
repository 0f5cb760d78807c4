"""What is recorded does not depend on how much of a request was read anew."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from gyre_hpc.gateway.calls import Ended, Started
from gyre_hpc.gateway.dialects import anthropic, bodies
from gyre_hpc.gateway.recorder import RecorderSettings
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.text.toolcalls import blocks_of
from tests.gateway.fakes import Bench, bench, tool_call


async def ask(made: Bench, messages: list[dict[str, Any]], system: str, reply: str, remember: bool) -> list[dict[str, Any]]:
    """One call, with what is known of the execution's bodies or without; the blocks of its answer."""
    made.engine.replies.append(reply)
    raw = orjson.dumps({"messages": messages, "system": system, "max_tokens": 90})
    asked = anthropic.Messages().ask(raw, {}, "m", made.recorder.memory(0) if remember else None)
    stream = made.recorder.open(0, asked.call)
    stream.follow()
    seen = 0
    while not stream.done:
        seen += len(await asyncio.wait_for(stream.after(seen, 5), 6))
    stream.leave()
    assert stream.error is None
    return list(blocks_of(event for event in stream.events if not isinstance(event, Started | Ended)))


async def play(made: Bench, seed: int, remember: bool) -> list[tuple[Any, ...]]:
    """A harness that goes on, cuts back, edits, compacts and opens others; what was recorded of it."""
    rng = random.Random(seed)
    history: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    system = "one"
    for turn in range(24):
        blocks = await ask(made, history, system, f"Look {turn}.\n{tool_call('bash', command=turn)}", remember)
        used = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = (
            [{"type": "tool_result", "tool_use_id": used[0], "content": f"out {rng.randrange(3)}"}]
            if used
            else [{"type": "text", "text": "on"}]
        )
        history = [*history, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        kind = rng.randrange(9)
        if kind == 0 and len(history) > 6:
            history = history[: rng.randrange(1, len(history) // 2) * 2 + 1]
        elif kind == 1:
            history = [{**message} for message in history]
            history[0] = {"role": "user", "content": f"go {turn}"}
        elif kind == 2:
            history[-1] = {**history[-1], "cache_control": {"type": "ephemeral"}}
        elif kind == 3:
            system = rng.choice(["one", "two"])
        elif kind == 4:
            await ask(made, history[:1], "side", "a title", remember)
        elif kind == 5:
            history[rng.randrange(len(history))]["content"] = "other words"
    tree = made.tree()
    calls = [(call.prompt, call.sampled, call.role, call.difference, call.finish) for call in tree.calls.values()]
    return [*calls, *(tuple(request.prompt) for request in made.engine.seen)]


@pytest.mark.parametrize("seed", range(4))
async def test_the_tree_is_the_same(tmp_path: Path, renderer: TurnRenderer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL", 0)
    told = []
    for remember in (True, False):
        async with bench(tmp_path / f"t{remember}", renderer, RecorderSettings(seed=1, window=1 << 16)) as made:
            told.append(await play(made, seed, remember))
    assert told[0] == told[1]
