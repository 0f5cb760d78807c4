"""Whatever a client sends to the three dialects over HTTP is answered or refused: never a 5xx of ours, never a hang, never half an answer.

Bodies are made of good ones: any values in them replaced, taken out or doubled, then any bytes of the JSON. All examples go to one gateway,
so that what one of them leaves behind is met by the next.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects import bodies
from gyre_hpc.gateway.recorder import RecorderSettings
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import Bench, bench, serving, tool_call

HANG = 20.0
"""Seconds after which an answer that does not come is called a hang; one takes milliseconds."""
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
USED = {"id": "t_1", "name": "bash", "input": {"command": "ls", "n": 1.0}}
CALL = {"id": "t_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
GOOD: dict[str, Any] = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 60,
        "stream": True,
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "bash", "description": "run", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": '{"session_id":"a"}'},
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "tool_use", **USED}]},
            {"role": "system", "content": "mind"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t_1", "content": [{"type": "text", "text": "a"}]}]},
        ],
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_completion_tokens": 60,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "bash", "description": "run", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "n": 1,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "D"}]},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "t_1", "content": "a"},
        ],
    },
    "/v1/responses": {
        "model": "m",
        "max_output_tokens": 60,
        "stream": True,
        "instructions": "S",
        "tools": [
            {"type": "function", "name": "bash", "description": "run", "parameters": SCHEMA},
            {"type": "custom", "name": "patch", "description": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "namespace", "name": "crm", "description": "c", "tools": [{"type": "function", "name": "find", "parameters": SCHEMA}]},
        ],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": "go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "t_1", "namespace": "crm", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t_1", "output": "a"},
            {"type": "custom_tool_call", "call_id": "t_2", "name": "patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "t_2", "output": [{"type": "input_text", "text": "b"}]},
        ],
    },
}
COUNT = "/v1/messages/count_tokens"
LAST = {"/v1/messages": b"message_stop", "/v1/chat/completions": b"[DONE]", "/v1/responses": b"response."}
"""What a whole stream has at its end."""
REPLIES = ["Look.\n" + tool_call("bash", command="ls"), "<think>hm</think>yes", "", tool_call("crm.find") + tool_call("patch", input="x")]
WORDS = "user assistant system tool developer text tool_use tool_result thinking image message function_call reasoning custom namespace"
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS.split())
    | st.text(max_size=4)
)
VALUES = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
)
CHANGES = st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["set", "drop", "double"]), VALUES), max_size=4)
CUTS = st.none() | st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3))


@dataclass
class Gateway:
    """One that answers all examples, and a client of it."""

    runner: asyncio.Runner
    made: Bench
    url: str
    http: aiohttp.ClientSession

    def post(self, path: str, raw: bytes) -> tuple[int, bytes]:
        """(status, body) of an answer that came to its end."""

        async def send() -> tuple[int, bytes]:
            async with self.http.post(f"{self.url}/x/s0{path}", data=raw) as answer:
                return answer.status, await answer.read()

        return self.runner.run(asyncio.wait_for(send(), HANG))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, renderer: TurnRenderer) -> Iterator[Gateway]:
    limits = RecorderSettings(seed=1, window=4096, max_calls=1 << 30)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def begin() -> Gateway:
            made = await stack.enter_async_context(bench(tmp_path_factory.mktemp("fuzz") / "trees", renderer, limits))
            url = await stack.enter_async_context(serving(made))
            return Gateway(runner, made, url, await stack.enter_async_context(aiohttp.ClientSession()))

        yield runner.run(begin())
        runner.run(stack.aclose())


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def changed(good: Any, changes: list[tuple[int, str, Any]]) -> Any:
    """A copy with these changes, one after the other."""
    body = copy.deepcopy(good)
    for where, how, value in changes:
        found = places(body)
        if not found:
            break
        container, key = found[where % len(found)]
        if how == "set":
            container[key] = copy.deepcopy(value)
        elif how == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
    return body


@pytest.mark.parametrize("small", [True, False], ids=["parsed", "by-parts"])
@pytest.mark.parametrize("path", [*GOOD, COUNT])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, cut=CUTS, reply=st.sampled_from(REPLIES))
def test_no_body_makes_a_5xx_a_hang_or_half_an_answer(
    gateway: Gateway,
    path: str,
    small: bool,
    changes: list[tuple[int, str, Any]],
    cut: tuple[float, int, bytes] | None,
    reply: str,
) -> None:
    body = changed(GOOD[path.removesuffix("/count_tokens")], changes)
    raw = orjson.dumps(body)
    if cut is not None:
        at = int(cut[0] * len(raw))
        raw = raw[:at] + cut[2] + raw[at + cut[1] :]
    gateway.made.engine.replies[:] = [reply]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SMALL", bodies.SMALL if small else 0)
        status, said = gateway.post(path, raw)
    assert status in (200, 400), said
    assert gateway.made.fatal == []
    if status == 400:
        assert orjson.loads(said)["error"]["message"]
    elif said.startswith((b"event:", b"data:", b":")):
        assert LAST[path] in said.rstrip().rsplit(b"\n\n", 1)[-1]
    else:
        assert isinstance(orjson.loads(said), dict)


def test_good_bodies_are_answered(gateway: Gateway) -> None:
    """Else nothing above would be tried but refusals."""
    for path in (*GOOD, COUNT):
        assert gateway.post(path, orjson.dumps(GOOD[path.removesuffix("/count_tokens")]))[0] == 200
