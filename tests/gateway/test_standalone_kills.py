"""The gateway alone, killed (-9) again and again while conversations go on: nothing that a harness got is lost, and no history forks.

KILLS and SEED of the environment choose how often and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.endpoint import Endpoint, endpoint
from tests.gateway.test_standalone import gateway
from tests.ports import free_port
from trees.records import Fate
from trees.store import StoreReader
from trees.tree import Tree
from trees.verify import verify

KILLS = int(os.environ.get("KILLS", "8"))
SEED = int(os.environ.get("SEED", "0"))
CONVERSATIONS = 6
pytestmark = [pytest.mark.job, pytest.mark.timeout(120 + 60 * KILLS)]


@pytest.fixture
async def server(renderer: TurnRenderer) -> AsyncIterator[Endpoint]:
    async with endpoint(renderer) as made:
        made.pause = 0.01
        made.longest = 100_000
        yield made


class Harness:
    """One conversation that repeats a request, byte for byte, until it has the whole answer."""

    def __init__(self, url: str, secret: str, rng: random.Random) -> None:
        self.url, self.secret, self.rng = url, secret, rng
        self.turns: list[dict[str, Any]] = [{"role": "user", "content": f"task {secret[:2]}"}]
        self.answers: list[str] = []
        self.stopped = False

    async def go_on(self) -> None:
        async with aiohttp.ClientSession() as http:
            while not self.stopped:
                body = {"model": "m", "max_tokens": 64, "messages": self.turns, "stream": self.rng.random() < 0.5}
                answer = None
                while answer is None:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        answer = await self.ask(http, body)
                    if answer is None:
                        await asyncio.sleep(0.1)
                self.answers.append(answer)
                self.turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {len(self.answers)}"}]

    async def ask(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> str | None:
        """The text of a whole answer; raises or None for one that broke."""
        async with http.post(f"{self.url}/x/{self.secret}/v1/messages", json=body) as answer:
            if answer.status != 200:
                assert answer.status == 500, (answer.status, await answer.text())
                return None
            if not body["stream"]:
                return str((await answer.json())["content"][0]["text"])
            text, ended = "", False
            async for line in answer.content:
                if line.startswith(b"data: "):
                    event = yaml.safe_load(line[6:])
                    text += event.get("delta", {}).get("text", "")
                    ended |= event["type"] == "message_stop"
            return text if ended else None


async def test_nothing_that_was_answered_is_lost_and_no_history_forks(
    tmp_path: Path, model: Path, renderer: TurnRenderer, server: Endpoint
) -> None:
    rng = random.Random(SEED)
    port = free_port()
    config = tmp_path / "record.yaml"
    tree: dict[str, Any] = {"run": {"dir": str(tmp_path / "run")}, "model": {"path": str(model), "window": 100_000}}
    tree |= {"gateway": {"port": port, "seal_every": 1}, "upstream": {"urls": [server.url]}}
    config.write_text(yaml.safe_dump(tree))
    server.replies = [f"answer {n} of them all" for n in range(100_000)]
    harnesses: list[Harness] = []
    for kill in range(KILLS):
        async with gateway(config) as running:
            if kill == 0:
                made = await running.api("/api/groups", {"task": "t", "size": CONVERSATIONS})
                harnesses = [Harness(running.address["url"], one["secret"], random.Random(n)) for n, one in enumerate(made["executions"])]
                working = [asyncio.create_task(harness.go_on()) for harness in harnesses]
            other = (await running.api("/api/groups", {"task": "short", "size": 1}))["executions"][0]["execution"]
            await running.api(f"/api/executions/{other}/end", {})  # something to seal, so that journals rotate
            await asyncio.sleep(rng.uniform(0.05, 2.0))
            running.process.kill()
            await running.process.wait()
    async with gateway(config) as running:
        for harness in harnesses:
            harness.stopped = True
        await asyncio.wait_for(asyncio.gather(*working), 120)
        for n in range(CONVERSATIONS):
            await running.api(f"/api/executions/{n}/end", {"score": 1.0})
        assert (await running.stop())[0] == 0
    assert verify(running.paths.trees) == []
    lost = 0
    with StoreReader(running.paths.trees) as reader:
        for n, harness in enumerate(harnesses):
            lost += check(reader.tree(n), harness, renderer)
    print(f"{KILLS} kills, {sum(len(h.answers) for h in harnesses)} answers, {lost} calls lost in flight")
    assert lost > 0


def check(tree: Tree, harness: Harness, renderer: TurnRenderer) -> int:
    """What the harness got is one line of the tree, in order and once; how many calls were lost."""
    calls = list(tree.calls.values())
    lost = [call for call in calls if call.fate is None]
    assert tree.incomplete == bool(lost)
    assert {call.difference for call in calls if call.fate is Fate.DELIVERED} <= {"clean", "retry"}
    last = calls[-1]
    assert last.fate is Fate.DELIVERED
    line = tree.path(last.sampled)
    sampled = [call.sampled for call in calls if call.fate is Fate.DELIVERED and call.sampled in line]
    assert [renderer.tokenizer.decode(tree.tokens_of([node]).tolist()[:-1]) for node in sampled] == harness.answers
    return len(lost)
