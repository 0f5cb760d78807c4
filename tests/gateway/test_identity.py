"""An execution reaches its own record and nothing else, whatever it says and whichever dialect it speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import Bench, bench, serving, tool_call
from trees.records import NodeKind

TOOL = {"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


@pytest.fixture
async def url(made: Bench) -> AsyncIterator[str]:
    async with serving(made) as address:
        yield address


async def post(url: str, secret: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/x/{secret}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_the_history_of_another_execution_is_text_and_no_more(made: Bench, url: str) -> None:
    """Word for word, with the ids of the other's tool calls: nothing of the other's tokens, answers or judgements comes with it."""
    made.engine.replies += ["My secret plan. " + tool_call("bash", command="ls"), "yours", "mine again"]
    body: dict[str, Any] = {"max_tokens": 100, "tools": [TOOL], "messages": [{"role": "user", "content": "go"}]}
    first = await post(url, "s0", "/v1/messages", body)
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "ok"}
    told = {
        **body,
        "messages": [*body["messages"], {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}],
    }
    await post(url, "s1", "/v1/messages", told)
    theirs, ours = made.tree(0), made.tree(1)
    assert {n for n, row in theirs.nodes.items() if row.kind is NodeKind.SAMPLED}.isdisjoint(ours.nodes)
    (call,) = ours.calls.values()
    assert call.difference == "clean"
    assert ours.tokens_of([call.sampled]).tolist() == made.engine.said[1]
    await post(url, "s1", "/v1/messages", body)  # the other's request, byte for byte: no answer is told again
    assert len(made.engine.seen) == 3
    assert len(made.tree(0).calls) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_nothing_is_kept_for_a_later_question_of_another_execution(made: Bench, url: str, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "go"}]} if "chat" in path else {"input": "go"}
    first = await post(url, "s0", path, {"model": "m", **asked})
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "input": "more", "previous_response_id": first["id"]}
        async with http.post(f"{url}/x/s1/v1/responses", json=body) as answer:
            assert answer.status == 400
            assert "go" not in (await answer.text()).split()


async def test_no_path_tells_of_executions(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for path in (
            "/x/s0",
            "/x/s0/",
            "/x/s0/v1",
            "/x/s0/x/s1/v1/models",
            "/x//v1/models",
            "/x/s0%2Fs1/v1/models",
        ):
            async with http.get(f"{url}{path}") as answer:
                assert answer.status in (401, 404), path
                assert "s1" not in (await answer.text()).replace(path, "")
