"""Servers of others: what is asked, what is understood, what is never guessed. The wire itself: tests/gateway/test_standalone.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gyre_hpc.engines.protocol import EngineAddress, EngineFault, GenerateRequest, RequestRefused, Sampling, TokenChunk
from gyre_hpc.engines.streaming import Lines
from gyre_hpc.engines.upstream import AS_IDS, AS_NAMES, OPENAI, VLLM, UpstreamClient, Wire, parse_chunk, read_line, request_body, root_of

OURS = Wire(OPENAI, "m", lambda: 7, key="sesame")
THEIRS = Wire(VLLM, "m", lambda: 7)
CALL = GenerateRequest("call-1", [1, 2, 3], Sampling(50, 0.7, stop=(9,)))
KNOBS = {
    "max_tokens": 17,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "logprobs": 0,
}


def test_every_knob_is_sent_so_that_no_default_of_a_server_cuts_the_distribution() -> None:
    body = json.loads(request_body(CALL, 20, OURS))
    assert body == {"model": "m", "prompt": [1, 2, 3], **KNOBS, AS_NAMES: True, "skip_special_tokens": False, "stream": True}
    assert json.loads(request_body(CALL, 20, Wire(OPENAI, "m", lambda: 7, ids=AS_IDS)))[AS_IDS]
    assert json.loads(request_body(CALL, 20, THEIRS)) == {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {**KNOBS, "detokenize": False},
        "stream": True,
    }


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (GenerateRequest("c", list(range(20)), Sampling(5)), "window of 20"),
        (GenerateRequest("c", [], Sampling(5)), "prompt of 0 tokens"),
        (GenerateRequest("c", [1], Sampling(5, top_p=0.9)), "top_p 1"),
        (GenerateRequest("c", [1], Sampling(5, top_k=3)), "top_k 0"),
    ],
)
def test_what_can_not_be_sampled_as_promised_is_refused(call: GenerateRequest, why: str) -> None:
    with pytest.raises(RequestRefused, match=why):
        request_body(call, 20, OURS)


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **fields}]}


def named(*tokens: int, logprobs: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    values = [-0.5] * len(tokens) if logprobs is None else logprobs
    return choice(logprobs={"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": values}, **fields)


def test_ids_come_by_name_or_as_numbers() -> None:
    assert parse_chunk(named(4, 5), OURS) == TokenChunk([4, 5], [-0.5, -0.5], [7, 7])
    numbers = choice(token_ids=[4], logprobs={"tokens": ["x"], "token_logprobs": [-1]}, finish_reason="stop")
    assert parse_chunk(numbers, OURS) == TokenChunk([4], [-1.0], [7], "stop")
    assert parse_chunk({"choices": [], "usage": {}}, OURS) is None
    assert parse_chunk(choice(text="", logprobs=None, token_ids=[]), OURS) is None
    assert parse_chunk(named(finish_reason="length"), OURS) == TokenChunk([], [], [], "length")


def test_vllm_tells_the_weights_of_every_token_with_the_last() -> None:
    told = {"content": [{"logprob": -0.25}, {"logprob": -0.5}]}
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    last = choice(token_ids=[8, 9], logprobs=told, finish_reason="stop", weight_versions=spans)
    assert parse_chunk(last, THEIRS) == TokenChunk([8, 9], [-0.25, -0.5], [7, 7], "stop", [3, 4, 4])
    unnamed = choice(token_ids=[8, 9], logprobs=told, weight_versions=[{"version": "default", "start": 0, "end": 2}])
    assert parse_chunk(unnamed, THEIRS) == TokenChunk([8, 9], [-0.25, -0.5], [7, 7])


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"object": "x"}, "the server says"),
        (named(1, finish_reason="abort"), "ended the call: abort"),
        (named(1, 2, logprobs=[-0.5]), "2 tokens with 1 log-probs"),
        (named(1, logprobs=[None]), "no log-probs"),
        (named(1, logprobs=["-0.5"]), "no log-probs"),
        (choice(token_ids=[1], logprobs=None), "1 tokens with 0 log-probs"),
        (choice(token_ids=[1.5], logprobs={"token_logprobs": [-0.5]}), "no token ids"),
        (choice(token_ids=[-1], logprobs={"token_logprobs": [-0.5]}), "no token ids"),
        (choice(token_ids=[1 << 31], logprobs={"token_logprobs": [-0.5]}), "no token ids"),
        (choice(logprobs={"tokens": ["a"], "token_logprobs": [-0.5]}), "without their ids"),
        (named(1, weight_versions=[{"version": "3", "start": 1, "end": 2}]), "do not follow"),
        (named(1, weight_versions=[{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 2, "end": 3}]), "do not follow"),
        (named(1, weight_versions=[{"version": "3", "start": 0, "end": 1 << 40}]), "do not follow"),
    ],
)
def test_what_is_missing_is_a_fault_and_never_guessed(event: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineFault, match=why):
        parse_chunk(event, OURS)


@pytest.mark.parametrize("data", [b"{", b"[]", b"3", b'{"choices": 3}', b'{"choices": [3]}', b'{"choices": [{"logprobs": 3}]}'])
def test_an_event_of_another_form_is_a_fault(data: bytes) -> None:
    (fault,) = Lines(lambda line: read_line(line, OURS)).feed(b"data: " + data + b"\n")
    assert isinstance(fault, EngineFault)


def test_the_key_is_sent_and_not_shown() -> None:
    assert OURS.headers["Authorization"] == "Bearer sesame"
    assert "Authorization" not in THEIRS.headers
    assert "sesame" not in repr(OURS)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_is_taken_with_and_without_v1(url: str) -> None:
    assert root_of(url) == "http://h:1"


@pytest.mark.parametrize("told", [1, 2, 3])
async def test_versions_of_other_tokens_than_were_sent_are_a_fault(told: int) -> None:
    """In two events, of which the last tells the versions of `told` tokens."""
    content = {"content": [{"logprob": -0.5}]}
    spans = [{"version": "3", "start": 0, "end": told}]
    events = [choice(token_ids=[4], logprobs=content), choice(token_ids=[5], logprobs=content, finish_reason="stop", weight_versions=spans)]

    async def generate(request: web.Request) -> web.Response:
        return web.Response(text="".join(f"data: {json.dumps(event)}\n\n" for event in events), content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    async with TestServer(app) as server:
        client = UpstreamClient(EngineAddress("vllm", str(server.make_url("")), 1, 64), THEIRS)
        try:
            if told == 2:
                assert [chunk async for chunk in client.generate(CALL)] == [TokenChunk([4, 5], [-0.5] * 2, [7, 7], "stop", [3, 3])]
            else:
                with pytest.raises(EngineFault, match=f"versions of {told} tokens, it sent 2"):
                    _ = [chunk async for chunk in client.generate(CALL)]
        finally:
            await client.close()
