"""Over real HTTP: the official SDK, and what harnesses meet when things go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from gyre_hpc.engines.protocol import EngineFault
from gyre_hpc.gateway.admission import Over
from gyre_hpc.gateway.app import HarnessApi, build_app
from gyre_hpc.gateway.recorder import RecorderSettings
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import Bench, Secrets, bench, serving, tool_call
from trees.records import Fate

BASH: Any = {"name": "bash", "description": "run", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


@pytest.fixture
async def url(made: Bench) -> AsyncIterator[str]:
    async with serving(made, ping=0.1) as address:
        yield address


@pytest.fixture
async def sdk(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=f"{url}/x/s0", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(text: str = "go", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 300, "messages": [{"role": "user", "content": text}], **fields}


async def until_broken(answer: aiohttp.ClientResponse) -> bytes:
    """What came before the connection broke; fails when it ended properly."""
    received = b""
    try:
        async for chunk in answer.content.iter_any():
            received += chunk
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
        return received
    raise AssertionError("the stream came to a clean end")


async def test_sdk_streaming_over_several_turns(made: Bench, sdk: anthropic.AsyncAnthropic) -> None:
    made.engine.replies += ["Look.\n" + tool_call("bash", command="ls", n=1.0), "All done."]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with sdk.messages.stream(model="m", max_tokens=300, system="S", tools=[BASH], messages=messages) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert first.stop_reason == "tool_use"
    used: Any = first.content[1]
    assert used.input == {"command": "ls", "n": 1}
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(made.engine.seen[0].prompt), len(made.engine.said[0]))
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "a b"}]}]},
    ]
    async with sdk.messages.stream(
        model="m", max_tokens=300, system=[{"type": "text", "text": "S"}], tools=[BASH], messages=messages
    ) as stream:
        assert await stream.get_final_text() == "All done."
    assert [call.difference for call in made.tree().calls.values()] == ["clean", "clean"]
    assert len(made.tree().leaves) == 1


async def test_sdk_plain(made: Bench, sdk: anthropic.AsyncAnthropic) -> None:
    made.engine.replies.append("hello é")
    message = await sdk.messages.create(**body())
    assert [block.model_dump(include={"type", "text"}) for block in message.content] == [{"type": "text", "text": "hello é"}]
    assert message.stop_reason == "end_turn"
    made.engine.replies.append("hello é")
    assert (await sdk.messages.create(**body(max_tokens=3))).stop_reason == "max_tokens"


async def test_sync_sdk(made: Bench, url: str) -> None:
    """Plain, streamed by events and by the helper, with the key as a header and a beta that is on."""
    made.engine.replies += [tool_call("bash", command="ls"), "hello é", "hello é"]

    def ask() -> tuple[Any, list[Any], str, list[str]]:
        with anthropic.Anthropic(base_url=url, api_key="s1", max_retries=0) as client:
            asked: Any = body("go", tools=[BASH])
            whole = client.messages.create(**asked)
            used: Any = whole.content[0]
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "a"}
            asked["messages"] += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
            events = list(client.beta.messages.create(**asked, stream=True, betas=["context-1m-2025-08-07"]))
            with client.messages.stream(**body("go on")) as stream:
                text = stream.get_final_text()
            return whole, events, text, [model.id for model in client.models.list()]

    whole, events, text, models = await asyncio.to_thread(ask)
    assert (whole.stop_reason, whole.content[0].input) == ("tool_use", {"command": "ls"})
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == text == "hello é"
    assert models == ["policy"]
    assert [call.difference for call in made.tree(1).calls.values()][:2] == ["clean", "clean"]


async def test_sdk_count_tokens_and_models(made: Bench, sdk: anthropic.AsyncAnthropic) -> None:
    counted = await sdk.messages.count_tokens(model="m", messages=[{"role": "user", "content": "go"}], system="S")
    await sdk.messages.create(**body(system="S"))
    assert counted.input_tokens == len(made.engine.seen[0].prompt)
    assert [entry.id async for entry in sdk.models.list()] == ["policy"]
    assert (await sdk.models.retrieve("other")).id == "other"


async def test_sdk_errors(sdk: anthropic.AsyncAnthropic, url: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="image blocks are not supported"):
        await sdk.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])  # type: ignore[list-item,typeddict-item]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        async with sdk.messages.stream(**body("x" * 5000)):
            pass
    async with anthropic.AsyncAnthropic(base_url=f"{url}/x/wrong", api_key="none", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**body())


async def test_the_secret_may_come_as_a_key(url: str, http: aiohttp.ClientSession) -> None:
    for headers, status in (({"x-api-key": "s1"}, 200), ({"Authorization": "Bearer s1"}, 200), ({"x-api-key": "s9"}, 401), ({}, 401)):
        async with http.post(f"{url}/v1/messages", json=body(), headers=headers) as answer:
            assert answer.status == status
            assert answer.headers.get("x-should-retry") == ("false" if status == 401 else None)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_what_can_never_be_done_makes_clients_stop(
    tmp_path: Path, renderer: TurnRenderer, http: aiohttp.ClientSession, path: str
) -> None:
    """An execution that has spent its calls, and a body that is too large: a clean refusal that says not to retry."""
    async with bench(tmp_path / "spent", renderer, RecorderSettings(seed=0, window=4096, max_calls=1)) as b:
        runner = web.AppRunner(build_app(HarnessApi(b.recorder, Secrets(s0=0), "policy"), max_body=5000))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/x/s0{path}"
            turn = {"role": "user", "content": "hi"}
            asked = {"model": "m", "max_tokens": 9, "messages": [turn], "input": [turn]}
            answers = []
            for extra in ({}, {"user": "1"}, {"user": "x" * 6000}):
                async with http.post(url, json={**asked, **extra}) as answer:
                    answers.append((answer.status, answer.headers.get("x-should-retry"), (await answer.json()).get("error")))
        finally:
            await runner.cleanup()
    spent = 404 if path == "/v1/chat/completions" else 400
    assert [answer[:2] for answer in answers] == [(200, None), (spent, "false"), (413, "false")]
    assert "all it may make" in answers[1][2]["message"]
    assert "gateway.max_body_mb" in answers[2][2]["message"]


async def test_an_execution_that_is_over_makes_clients_stop(made: Bench, http: aiohttp.ClientSession) -> None:
    """410, and the official SDKs send nothing a second time."""

    class Ended:
        asked = 0

        def execution_of(self, secret: str) -> int | None:
            self.asked += 1
            raise Over("execution 7 is over")

    async def status_of(call: Coroutine[Any, Any, Any]) -> int:
        try:
            await call
        except (anthropic.APIStatusError, openai.APIStatusError) as error:
            return error.status_code
        return 200

    ended = Ended()
    runner = web.AppRunner(build_app(HarnessApi(made.recorder, ended, "policy")))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with (
        anthropic.AsyncAnthropic(base_url=f"{url}/x/7-secret", api_key="none", max_retries=3) as claude,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="7-secret", max_retries=3) as gpt,
    ):
        assert await status_of(claude.messages.create(**body())) == 410
        assert await status_of(gpt.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])) == 410
        assert await status_of(gpt.responses.create(model="m", input="go")) == 410
    assert ended.asked == 3
    await runner.cleanup()


async def test_probes_and_unknown_paths(url: str, http: aiohttp.ClientSession) -> None:
    for path in ("/", "/x/s0/api/hello", "/api/hello", "/x/s0/v1/messages?beta=true", "/x/s0/v1/chat/completions", "/x/s0/v1/responses"):
        async with http.head(url + path) as answer:
            assert answer.status == 200
    async with http.get(f"{url}/x/s0/nothing") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["type"] == "not_found_error"
    async with http.post(f"{url}/x/s0/v1/messages", data=b"{") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_headers_come_at_once_and_pings_while_it_waits(made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    asyncio.get_running_loop().call_later(0.5, made.engine.gate.set)
    async with http.post(f"{url}/x/s0/v1/messages", json=body(stream=True)) as answer:
        assert not made.engine.gate.is_set()
        text = (await answer.read()).decode()
    assert text.count("event: ping") >= 4
    assert text.rstrip().endswith('data: {"type":"message_stop"}')


async def test_a_long_plain_call_is_kept_alive_with_white_space(made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    asyncio.get_running_loop().call_later(1.6, made.engine.gate.set)
    async with http.post(f"{url}/x/s0/v1/messages", json=body()) as answer:
        assert not made.engine.gate.is_set()
        raw = await answer.read()
    assert raw.startswith(b"  ")
    assert json.loads(raw)["content"] == [{"type": "text", "text": "done"}]


async def test_a_broken_stream_ends_with_a_reset(made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.replies += [EngineFault("gone"), EngineFault("gone"), "fine"]
    async with http.post(f"{url}/x/s0/v1/messages", json=body(stream=True)) as answer:
        received = await until_broken(answer)
    assert b"event: message_start" in received
    assert b"event: error" not in received, "an error event makes Claude Code give streaming up"
    assert b"message_stop" not in received
    async with http.post(f"{url}/x/s0/v1/messages", json=body()) as answer:
        assert answer.status == 500
    assert made.recorder.faulted(0)
    async with http.post(f"{url}/x/s0/v1/messages", json=body(stream=True)) as answer:
        assert b"message_stop" in await answer.read()
    assert not made.recorder.faulted(0)
    assert [call.fate for call in made.tree().calls.values()] == [Fate.BROKEN, Fate.BROKEN, Fate.DELIVERED]
    assert made.answers == {"reset": 1, "500": 1, "200": 1}


async def test_a_disconnect_cancels_the_call(made: Bench, url: str) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("a long answer")
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{url}/x/s0/v1/messages", json=body(stream=True))
        await answer.content.readany()
        answer.close()
    async with asyncio.timeout(30):
        while made.recorder.in_flight:
            await asyncio.sleep(0.005)
    assert made.engine.cancelled == 1
    assert made.answers == {"left": 1}
    call = next(iter(made.tree().calls.values()))
    assert call.fate is Fate.CANCELLED
    assert made.tree().tokens_of([call.sampled]).tolist() == made.engine.said[0][:3]


async def test_retries_are_coalesced_and_replayed_byte_for_byte(made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    made.engine.replies.append(tool_call("bash", command="ls"))

    async def post() -> bytes:
        async with http.post(f"{url}/x/s0/v1/messages", json=body(stream=True)) as answer:
            return (await answer.read()).replace(b'event: ping\ndata: {"type":"ping"}\n\n', b"")

    both = [asyncio.create_task(post()) for _ in range(2)]
    await asyncio.sleep(0.2)
    made.engine.gate.set()
    first, second = await asyncio.gather(*both)
    assert first == second == await post()
    assert len(made.engine.seen) == 1


async def test_a_gateway_that_stops_breaks_its_calls_visibly(made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    answer = await http.post(f"{url}/x/s0/v1/messages", json=body(stream=True))
    await answer.content.readany()
    await made.recorder.finish(0)
    received = await until_broken(answer)
    assert b"message_stop" not in received


@pytest.mark.parametrize("broken", ["system", "depth"])
async def test_garbage_of_the_right_shape_is_the_senders_fault(url: str, http: aiohttp.ClientSession, broken: str) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = {"a": [deep]}
    block = {"type": "tool_use", "id": "t", "name": "bash", "input": deep}
    asked = (
        body(system=5)
        if broken == "system"
        else body(messages=[{"role": "assistant", "content": [block]}, {"role": "user", "content": "x"}])
    )
    async with http.post(f"{url}/x/s0/v1/messages", json=asked) as answer:
        assert answer.status == 400, await answer.text()
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


GO = json.dumps({"max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "input": "go"}).encode()
CLOSE = b"\r\nConnection: close\r\n\r\n"


LINES = (
    (b"x-claude-code-agent-id: a\xff", b"200"),
    (b"x-codex-parent-thread-id: a\r\nthread-id: \xff\xfe", b"200"),
    (b"x-parent-session-id: p\r\nx-session-id: s\xff", b"200"),
    (b"User-Agent: \xff", b"200"),
    (b"Content-Encoding: \xff", b"200"),
    (b"Content-Encoding: gzip", b"400"),
    (b"Content-Encoding: deflate", b"400"),
    (b"Content-Encoding: br", b"400"),
    (b"Content-Length: 7", b"400"),
    (b"Transfer-Encoding: chunked", b"400"),
)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens"])
async def test_headers_that_are_no_text_and_bodies_that_are_not_what_they_say(url: str, path: str) -> None:
    """No 5xx: an id is one whatever its bytes are, and a body that can't be unpacked is the sender's fault."""
    for line, status in LINES:
        length = b"" if b"Length" in line or b"chunked" in line else f"\r\nContent-Length: {len(GO)}".encode()
        answer = await _sent(url, b"POST /x/s0" + path.encode() + b" HTTP/1.1\r\nHost: a\r\n" + line + length + CLOSE + GO)
        assert answer.split(b" ", 2)[1] == status, (line, answer)


async def test_paths_that_are_no_text(url: str) -> None:
    for path in (b"/\xff", b"/x/s0/\xff", b"/x/\xff/v1/models", b"/x/s0/v1/models/%ff", b"/x/s0/v1/models/\xed\xa0\x80"):
        answer = await _sent(url, b"GET " + path + b" HTTP/1.1\r\nHost: a" + CLOSE)
        assert answer.split(b" ", 2)[1] in (b"200", b"400", b"401", b"404"), answer


async def _sent(url: str, raw: bytes) -> bytes:
    """All that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(raw)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
