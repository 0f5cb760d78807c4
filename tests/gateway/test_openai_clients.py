"""OpenAI's dialects over real HTTP: the official SDK, sync and streaming, and what clients meet when things go wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gyre_hpc.engines.protocol import EngineFault
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.fakes import Bench, bench, serving, tool_call
from tests.gateway.test_app import until_broken
from trees.records import Fate, Role

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: Any = {"type": "function", "function": {"name": "bash", "description": "run", "parameters": PARAMETERS}}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
LAST = {CHAT: b"data: [DONE]", RESPONSES: b"event: response.completed"}
"""Path -> what only a whole stream ends with."""
PINGS = re.compile(rb"(?:: ping|event: response\.in_progress\n[^\n]*)\n\n")
PATHS = list(LAST)


@pytest.fixture
async def made(tmp_path: Path, renderer: TurnRenderer) -> AsyncIterator[Bench]:
    async with bench(tmp_path / "trees", renderer) as b:
        yield b


@pytest.fixture
async def url(made: Bench) -> AsyncIterator[str]:
    async with serving(made, ping=0.1) as address:
        yield address


@pytest.fixture
async def sdk(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/x/s0/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(path: str, text: str = "go", **fields: Any) -> dict[str, Any]:
    return {"model": "m", **({"messages": [{"role": "user", "content": text}]} if path == CHAT else {"input": text}), **fields}


def differences(made: Bench) -> list[str]:
    return [call.difference for call in made.tree().calls.values()]


# -- the SDK: Chat Completions ----------------------------------------------------------------------------------------------------
async def test_chat_streaming_over_several_turns_with_arguments_written_anew(made: Bench, sdk: openai.AsyncOpenAI) -> None:
    made.engine.replies += [
        "<think>hm</think>Look.\n" + tool_call("bash", command="ls", n=1.0, m="é") + tool_call("bash", command="pwd") + "\nso",
        tool_call("bash", command="cat"),
        "All done.",
    ]
    messages: list[Any] = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]
    options: Any = {"model": "m", "tools": [BASH], "stream_options": {"include_usage": True}}
    async with sdk.chat.completions.stream(messages=messages, **options) as stream:
        kinds = {event.type async for event in stream}
        first = await stream.get_final_completion()
    assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(made.engine.seen[0].prompt), len(made.engine.said[0]))
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look.\n\nso")
    assert choice.message.tool_calls is not None
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert [arguments for _, _, arguments in calls] == [{"command": "ls", "n": 1, "m": "é"}, {"command": "pwd"}]

    def echoed(tool_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """As a client that parsed the arguments writes them: other spaces, another order of keys, 1 for 1.0."""
        text = json.dumps(dict(sorted(arguments.items(), reverse=True)), indent=1, ensure_ascii=True)
        return {"id": tool_id, "type": "function", "function": {"name": name, "arguments": text.replace("1.0", "1")}}

    messages[0]["content"] = [{"type": "text", "text": "S"}]
    messages += [
        {"role": "assistant", "content": "Look.\n\nso", "tool_calls": [echoed(*call) for call in calls]},
        *({"role": "tool", "tool_call_id": call[0], "content": "a b"} for call in calls),
    ]
    second = await sdk.chat.completions.create(model="m", messages=messages, tools=[BASH])
    used: Any = (second.choices[0].message.tool_calls or [])[0]
    assert second.choices[0].message.content is None
    for content in ("", None):  # as qwen-code and opencode write it; then as a dump of the SDK's object
        turn: Any = {"role": "assistant", "content": content, "tool_calls": [used.model_dump()]}
        result: Any = {"role": "tool", "tool_call_id": used.id, "content": f"c {content}"}
        third = await sdk.chat.completions.create(model="m", messages=[*messages, turn, result], tools=[BASH])
        assert third.choices[0].finish_reason == "stop"
    assert differences(made) == ["clean", "clean", "clean", "edit"]  # the last one: the same turn got another result
    tree = made.tree()
    assert len(tree.leaves) == 2
    prompt = made.engine.seen[2].prompt
    assert prompt[: len(made.engine.seen[1].prompt)] == made.engine.seen[1].prompt
    assert made.engine.seen[1].prompt[: len(made.engine.seen[0].prompt)] == made.engine.seen[0].prompt


async def test_chat_reasoning_is_delivered_and_not_required_back(made: Bench, sdk: openai.AsyncOpenAI) -> None:
    made.engine.replies += ["<think>hm</think>yes", "fine"]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    first = await sdk.chat.completions.create(model="m", messages=messages)
    assert first.choices[0].message.content == "yes"
    assert first.choices[0].message.model_extra == {"reasoning_content": "hm"}
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    await sdk.chat.completions.create(model="m", messages=messages)
    assert differences(made) == ["clean", "clean"]
    assert made.engine.said[0] == made.engine.seen[1].prompt[len(made.engine.seen[0].prompt) :][: len(made.engine.said[0])]


async def test_chat_sync_sdk(made: Bench, url: str) -> None:
    made.engine.replies += ["hello é", "hello é"]

    def ask() -> tuple[list[Any], Any, list[tuple[str, str]], str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s1", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "go"}]
            streamed = list(client.chat.completions.create(model="m", messages=messages, stream=True))
            whole = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=3)
            listed = [(model.id, model.object) for model in client.models.list()]
            return streamed, whole, listed, client.models.retrieve("other").id

    streamed, whole, models, other = await asyncio.to_thread(ask)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "hello é"
    assert whole.choices[0].finish_reason == "length"
    assert (models, other) == ([("policy", "model")], "other")
    assert len(made.tree(1).calls) == 2


async def test_chat_errors(sdk: openai.AsyncOpenAI, url: str) -> None:
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    with pytest.raises(openai.BadRequestError, match="image_url parts in a user message are not supported"):
        await sdk.chat.completions.create(model="m", messages=[image])
    for streamed in (True, False):
        with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
            await sdk.chat.completions.create(**body(CHAT, "x" * 5000, stream=streamed))
        assert caught.value.code == "context_length_exceeded"
    async with openai.AsyncOpenAI(base_url=f"{url}/x/wrong/v1", api_key="none", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="no live execution"):
            await stranger.chat.completions.create(**body(CHAT))


async def test_chat_sub_agents_by_header(made: Bench, sdk: openai.AsyncOpenAI) -> None:
    await sdk.chat.completions.create(**body(CHAT), extra_headers={"x-session-id": "a"})
    await sdk.chat.completions.create(**body(CHAT), extra_headers={"x-session-id": "b", "x-parent-session-id": "a"})
    assert [call.role for call in made.tree().calls.values()] == [Role.MAIN, Role.SUB_AGENT]
    assert differences(made) == ["clean", "sub-agent"]


# -- the SDK: Responses -------------------------------------------------------------------------------------------------------------
FUNCTION: Any = {"type": "function", "name": "bash", "description": "run", "parameters": PARAMETERS, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch", "description": "a patch"}
SPACE: Any = {"type": "namespace", "name": "crm", "description": "c", "tools": [{**FUNCTION, "name": "find"}]}


async def test_responses_streaming_over_several_turns(made: Bench, sdk: openai.AsyncOpenAI) -> None:
    made.engine.replies += [
        "<think>hm</think>Look.\n" + tool_call("bash", command="ls", n=1.0) + tool_call("crm.find", command="x") + "\nso",
        tool_call("patch", input="*** é") + tool_call("patch", other=1),
        "All done.",
    ]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": "go"},
    ]
    options: Any = {"model": "m", "instructions": "S", "tools": [FUNCTION, PATCH, SPACE]}
    async with sdk.responses.stream(input=items, **options) as stream:
        numbers = [event.sequence_number async for event in stream]
        first = await stream.get_final_response()
    assert sorted(set(numbers)) == list(range(numbers[-1] + 1))  # a ping repeats the last one
    assert numbers == sorted(numbers)
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item.type for item in first.output] == kinds
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(made.engine.seen[0].prompt), len(made.engine.said[0]))
    ls, find = (item for item in first.output if item.type == "function_call")
    assert (ls.name, ls.namespace, json.loads(ls.arguments)) == ("bash", None, {"command": "ls", "n": 1})
    assert (find.name, find.namespace) == ("find", "crm")
    echo = [item.model_dump() for item in first.output]
    echo[2]["arguments"] = '{ "n": 1,\n"command": "ls" }'
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "a"} for call in (ls, find)]
    second = await sdk.responses.create(input=[*items, *echo, *results], **options)
    assert [(item.type, item.input) for item in second.output if item.type == "custom_tool_call"] == [
        ("custom_tool_call", "*** é"),
        ("custom_tool_call", '{"other":1}'),
    ]
    # a client that stores neither thoughts nor ids nor states
    bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in echo if item["type"] != "reasoning"]
    calls = [{"type": "custom_tool_call", "call_id": item.call_id, "name": item.name, "input": item.input} for item in second.output]  # type: ignore[union-attr]
    outputs = [
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "b"}]} for call in calls
    ]
    third = await sdk.responses.create(input=[*items, *bare, *results, *calls, *outputs], **options)
    assert third.output_text == "All done."
    assert differences(made) == ["clean"] * 3
    assert len(made.tree().leaves) == 1
    assert made.engine.seen[2].prompt[: len(made.engine.seen[1].prompt)] == made.engine.seen[1].prompt


async def test_responses_sync_sdk(made: Bench, url: str) -> None:
    made.engine.replies += ["hello é", "hello é", "hello é"]

    def ask() -> tuple[list[Any], Any, list[Any]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s1", max_retries=0) as client:
            streamed = list(client.responses.create(model="m", input="go", stream=True))
            whole = client.responses.create(model="m", input="go", max_output_tokens=3)
            cut = list(client.responses.create(model="m", input="go", max_output_tokens=3, stream=True))
            return streamed, whole, cut

    streamed, whole, cut = await asyncio.to_thread(ask)
    assert streamed[-1].response.output_text == "hello é"
    assert (whole.status, whole.incomplete_details.reason, whole.output_text) == ("incomplete", "max_output_tokens", "hel")
    assert cut[-1].type == "response.incomplete"
    assert len(made.tree(1).calls) == 3


async def test_responses_errors(sdk: openai.AsyncOpenAI, url: str) -> None:
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,"}]}
    with pytest.raises(openai.BadRequestError, match="input_image parts in a user message are not supported"):
        await sdk.responses.create(model="m", input=[image])
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as `input`"):
        await sdk.responses.create(model="m", input="go", previous_response_id="resp_0")
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        await sdk.responses.create(**body(RESPONSES, "x" * 5000, stream=True))
    assert caught.value.code == "context_length_exceeded"


# -- either dialect -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
async def test_headers_come_at_once_and_pings_while_it_waits(path: str, made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    asyncio.get_running_loop().call_later(0.5, made.engine.gate.set)
    async with http.post(f"{url}/x/s0{path}", json=body(path, stream=True)) as answer:
        assert not made.engine.gate.is_set()
        assert answer.content_type == "text/event-stream"
        raw = await answer.read()
    assert len(PINGS.findall(raw)) >= 3
    assert raw.strip().split(b"\n\n")[-1].startswith(LAST[path])


@pytest.mark.parametrize("path", PATHS)
async def test_a_long_plain_call_is_kept_alive_with_white_space(path: str, made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()  # for longer than a plain answer waits with its headers
    asyncio.get_running_loop().call_later(1.5, made.engine.gate.set)
    async with http.post(f"{url}/x/s0{path}", json=body(path)) as answer:
        raw = await answer.read()
    assert raw.startswith(b"  ")
    assert "done" in json.dumps(json.loads(raw))


@pytest.mark.parametrize("path", PATHS)
async def test_a_broken_call_is_no_clean_end(path: str, made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.replies += [EngineFault("gone"), EngineFault("gone"), "fine"]
    async with http.post(f"{url}/x/s0{path}", json=body(path, stream=True)) as answer:
        received = await until_broken(answer)
    assert (b"the engine failed" in received) == (path == RESPONSES)
    assert LAST[path] not in received
    async with http.post(f"{url}/x/s0{path}", json=body(path)) as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["type"] == "server_error"
    async with http.post(f"{url}/x/s0{path}", json=body(path, stream=True)) as answer:
        assert LAST[path] in await answer.read()
    assert [call.fate for call in made.tree().calls.values()] == [Fate.BROKEN, Fate.BROKEN, Fate.DELIVERED]


@pytest.mark.parametrize("path", PATHS)
async def test_the_sdk_sees_a_broken_stream_as_an_error(path: str, made: Bench, sdk: openai.AsyncOpenAI) -> None:
    made.engine.replies += [EngineFault("gone")]
    create: Any = sdk.chat.completions.create if path == CHAT else sdk.responses.create
    with pytest.raises(openai.APIError):
        async for _ in await create(**body(path, stream=True)):
            pass


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_cancels_the_call(path: str, made: Bench, url: str) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("a long answer")
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{url}/x/s0{path}", json=body(path, stream=True))
        await answer.content.readany()
        answer.close()
    async with asyncio.timeout(30):
        while made.recorder.in_flight:
            await asyncio.sleep(0.005)
    assert made.engine.cancelled == 1
    call = next(iter(made.tree().calls.values()))
    assert call.fate is Fate.CANCELLED
    assert made.tree().tokens_of([call.sampled]).tolist() == made.engine.said[0][:3]


@pytest.mark.parametrize("path", PATHS)
async def test_retries_are_coalesced_and_replayed_byte_for_byte(path: str, made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.gate.clear()
    made.engine.replies.append("first" + tool_call("bash", command="ls"))

    async def post() -> bytes:
        async with http.post(f"{url}/x/s0{path}", json=body(path, stream=True)) as answer:
            return PINGS.sub(b"", await answer.read())

    both = [asyncio.create_task(post()) for _ in range(2)]
    await asyncio.sleep(0.2)
    made.engine.gate.set()
    first, second = await asyncio.gather(*both)
    assert first == second == await post()
    assert len(made.engine.seen) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_but_text_is_seen_before_it_is_durable(path: str, made: Bench, url: str, http: aiohttp.ClientSession) -> None:
    made.engine.replies.append("Look. " + tool_call("bash", command="ls"))
    commit, commits, disk = made.recorder.committer.commit, 0, asyncio.Event()

    async def slow() -> None:
        nonlocal commits
        commits += 1
        if commits == 2:  # the first one is that of the intent
            await disk.wait()
        await commit()

    made.recorder.committer.commit = slow  # type: ignore[method-assign]
    received = b""
    async with http.post(f"{url}/x/s0{path}", json=body(path, stream=True)) as answer:
        while len(PINGS.findall(received)) < 3:
            received += await answer.content.readany()
        assert b"Loo" in received
        assert b"bash" not in received
        assert b'finish_reason":"' not in received
        disk.set()
        rest = await answer.read()
    assert b"bash" in rest
    assert LAST[path] in rest


@pytest.mark.parametrize("path", PATHS)
async def test_errors_have_the_form_of_the_dialect(path: str, url: str, http: aiohttp.ClientSession) -> None:
    for headers, status in (({"Authorization": "Bearer s1"}, 200), ({"Authorization": "Bearer s9"}, 401), ({}, 401)):
        async with http.post(f"{url}{path}", json=body(path), headers=headers) as answer:
            assert answer.status == status
            if status == 401:
                assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
    for data in (b"{", b"[]", b"{}", b'{"messages": [{}]}', b'{"input": [{}]}', b'{"messages": {}, "input": {}}'):
        async with http.post(f"{url}/x/s0{path}", data=data) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
