"""vLLM behind the interface: translation (fast), and one real server (marked)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.soak_kv import total
from gyre_hpc.engines import vllm_guard
from gyre_hpc.engines.control import text
from gyre_hpc.engines.factory import connect, start_engine
from gyre_hpc.engines.frames import Frames
from gyre_hpc.engines.protocol import (
    EngineAddress,
    EngineFault,
    EngineSpec,
    GenerateRequest,
    NotReceived,
    RequestRefused,
    Sampling,
    Ticket,
    TokenChunk,
)
from gyre_hpc.engines.vllm_client import VllmClient, request_body
from gyre_hpc.engines.vllm_engine import VllmEngine, command, kv_tokens, prompt_logprobs, sequences
from gyre_hpc.engines.vllm_wire import Translator, parse_chunk
from gyre_hpc.engines.weight_stream import Sender
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.training.actor import published
from tests.engines.canaries import VERSION, changed, keeper_of, trained
from tests.engines.half_sender import half_sender
from tests.engines.models import VOCABULARY, plain_logprobs

TOLERANCE = 1e-4
WINDOW = 2048


def test_a_request_is_translated() -> None:
    request = GenerateRequest("r", [1, 2, 3], Sampling(50, 0.7, seed=5, stop=(7, 8)), position=2)
    body = json.loads(request_body(request, 20, True))
    sampling = body.pop("sampling_params")
    assert body == {"token_ids": [1, 2, 3], "stream": True}
    seed = sampling.pop("seed")
    assert sampling == {
        "max_tokens": 17,
        "temperature": 0.7,
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    again = json.loads(request_body(request, 20, True))["sampling_params"]["seed"]
    later = GenerateRequest("r", [1, 2, 3], request.sampling, position=3)
    assert seed == again != json.loads(request_body(later, 20, True))["sampling_params"]["seed"]
    assert "seed" not in json.loads(request_body(request, 20, False))["sampling_params"]


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest("a", [1] * 20, Sampling(1)),
        GenerateRequest("b", [], Sampling(1)),
        GenerateRequest("c", [1], Sampling(1, top_p=0.9)),
        GenerateRequest("d", [1], Sampling(1, top_k=3)),
    ],
)
def test_what_vllm_would_not_do_as_promised_is_refused(request_: GenerateRequest) -> None:
    with pytest.raises(RequestRefused):
        request_body(request_, 20, True)


def _event(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -1.5}]
    choice = {"finish_reason": None, "token_ids": [4, 5], "logprobs": {"content": content}, "weight_versions": None, **changes}
    return {"choices": [choice]}


def test_log_probs_of_a_prompt_are_read_or_refused() -> None:
    told = [None, {"7": {"logprob": -0.5, "rank": 2}, "9": {"logprob": -0.1, "rank": 1}}, {"8": {"logprob": -1.5, "rank": 1}}]
    assert prompt_logprobs([3, 7, 8], told) == [-0.5, -1.5]
    for broken in (None, told[:2], [None, {"9": {"logprob": -0.1}}, told[2]], [None, {"7": {}}, told[2]]):
        with pytest.raises(EngineFault, match="log-probs of a prompt of 3 tokens"):
            prompt_logprobs([3, 7, 8], broken)


def test_events_become_chunks_and_broken_promises_become_faults() -> None:
    assert parse_chunk(_event(), 3) == TokenChunk([4, 5], [-0.5, -1.5], [3, 3], None)
    spans = [{"version": "3", "start": 0, "end": 2}]
    assert parse_chunk(_event(finish_reason="stop", weight_versions=spans), 3).finish == "stop"
    for broken in (
        _event(finish_reason="abort"),
        _event(token_ids=[4]),
        _event(finish_reason="length", weight_versions=[*spans, {"version": "4", "start": 2, "end": 3}]),
        {"error": {"message": "EngineCore encountered an issue"}},
    ):
        with pytest.raises(EngineFault):
            parse_chunk(broken, 3)


def test_the_command_line_carries_options_and_guards_ours(models: tuple[Path, Path], tmp_path: Path) -> None:
    spec = EngineSpec("vllm", models[0], 0, 8, WINDOW, tmp_path / "log", options={"kv_gib": 2, "block_size": 32, "enforce-eager": False})
    argv = command(spec, 1234)
    for expected in (
        f"--model={models[0]}",
        "--port=1234",
        "--max-num-seqs=8",
        "--block-size=32",
        "--no-enforce-eager",
        "--enable-scale-out",
    ):
        assert expected in argv
    assert not [a for a in argv if "kv" in a]
    with pytest.raises(ConfigError, match=r"rollout\.options\.port"):
        command(EngineSpec("vllm", models[0], 0, 8, WINDOW, tmp_path / "log", options={"port": 1}), 1234)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        command(EngineSpec("vllm", tmp_path, 0, 8, WINDOW, tmp_path / "log"), 1234)


def test_what_a_server_holds_is_read_from_its_own_metrics(tmp_path: Path) -> None:
    line = 'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="21844",num_cpu_blocks="None"} 1.0'
    assert kv_tokens(f"# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n{line}\nother 1\n") == 699008
    for broken in ("", line.replace("21844", "None"), line.replace("block_size", "size")):
        with pytest.raises(EngineFault, match=r"do not tell its KV cache .*: set rollout\.capacity"):
            kv_tokens(broken)


def test_as_many_calls_at_once_as_are_asked_for_or_as_the_user_says(tmp_path: Path) -> None:
    def scheduled(capacity: int, **options: object) -> int:
        return sequences(EngineSpec("vllm", tmp_path, 0, capacity, WINDOW, tmp_path / "log", options=options))

    assert (scheduled(8), scheduled(0), scheduled(0, max_num_seqs=32), scheduled(8, **{"max-num-seqs": 16})) == (8, 256, 32, 16)


def test_a_server_that_hands_over_is_told_so_and_says_so(models: tuple[Path, Path], tmp_path: Path) -> None:
    argv = command(EngineSpec("vllm", models[0], 0, 8, WINDOW, tmp_path / "log", handover="nixl"), 1234)
    told = json.loads(next(a for a in argv if a.startswith("--kv-transfer-config=")).partition("=")[2])
    assert told["kv_connector_module_path"] == "gyre_hpc.engines.handover_connector"
    assert "--block-size=32" in argv
    with pytest.raises(ConfigError, match="take one of the two out"):
        command(EngineSpec("vllm", models[0], 0, 8, WINDOW, tmp_path / "log", options={"kv_transfer_config": {}}, handover="nixl"), 1234)


def test_a_ticket_goes_along_as_it_came() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_num_tokens": 3}
    body = json.loads(request_body(GenerateRequest("r", [1, 2, 3], Sampling(5, 0.0), 0, Ticket([1, 2, 3], 4, 1.0, params)), 20, True))
    assert body["kv_transfer_params"] == params


class _Upstream:
    """A fake ASGI application in vLLM's place: says which path it saw, and holds inference until told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: vllm_guard.Scope, receive: vllm_guard.Receive, send: vllm_guard.Send) -> None:
        if scope["path"].startswith("/inference/"):
            await self.go.wait()
            self.bodies = [(await receive())["body"], (await receive())["body"]]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


async def _ask(guard: vllm_guard.Guard, path: str, headers: dict[bytes, bytes] | None = None) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[vllm_guard.Message] = []

    async def receive() -> vllm_guard.Message:
        return {"type": "http.request", "body": b'{"token_ids":[1]}', "more_body": False}

    async def send(message: vllm_guard.Message) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": list((headers or {}).items())}
    await guard(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


async def test_the_guard_keeps_strangers_and_the_paused_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_guard.SECRET, "s3")
    monkeypatch.setenv(vllm_guard.VERSION, "4")
    upstream = _Upstream()
    guard = vllm_guard.Guard(upstream)
    for path in ("/health", "/s3", "/s3x/health", "/inference/v1/generate"):
        assert (await _ask(guard, path))[0] == 404
    assert (await _ask(guard, "/s3/health"))[::2] == (200, b"/health")
    call = asyncio.create_task(_ask(guard, "/s3/inference/v1/generate"))
    await asyncio.sleep(0)
    assert json.loads((await _ask(guard, "/s3/gyre"))[2]) == {"version": 4, "paused": False, "in_flight": 1}
    await _ask(guard, "/s3/pause")
    assert (await _ask(guard, "/s3/inference/v1/generate"))[0] == 503
    await _ask(guard, "/s3/gyre/version?5")
    upstream.go.set()
    assert (await call)[1][b"x-gyre-version"] == b"4"
    await _ask(guard, "/s3/resume")
    assert (await _ask(guard, "/s3/inference/v1/generate"))[1][b"x-gyre-version"] == b"5"
    assert json.loads((await _ask(guard, "/s3/gyre"))[2]) == {"version": 5, "paused": False, "in_flight": 0}


async def test_the_guard_refuses_kv_of_other_weights_and_salts_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_guard.SECRET, "s3")
    monkeypatch.setenv(vllm_guard.VERSION, "4")
    upstream = _Upstream()
    upstream.go.set()
    guard = vllm_guard.Guard(upstream)
    call = "/s3/inference/v1/generate"
    assert (await _ask(guard, call, {b"x-gyre-kv-version": b"4"}))[0] == 200
    assert upstream.bodies == [b'{"cache_salt":"4.0","token_ids":[1]}', b'{"token_ids":[1]}'], "the first piece of a body alone"
    status, _, body = await _ask(guard, call, {b"x-gyre-kv-version": b"3"})
    assert (status, json.loads(body)) == (409, {"error": "weights are version 4, the KV is of 3"})
    assert json.loads((await _ask(guard, "/s3/gyre"))[2])["in_flight"] == 0
    await _ask(guard, "/s3/gyre/forget")
    await _ask(guard, "/s3/gyre/version?5")
    await _ask(guard, call)
    assert upstream.bodies[0] == b'{"cache_salt":"5.1","token_ids":[1]}'


async def test_who_accepts_frames_gets_them_in_place_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_guard.SECRET, "s3")
    monkeypatch.setenv(vllm_guard.VERSION, "4")
    events = [
        _event(),
        _event(token_ids=[6], logprobs={"content": [{"logprob": -2.0}]}, finish_reason="stop"),
        {"choices": [], "usage": {}},
    ]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"

    async def stream(scope: vllm_guard.Scope, receive: vllm_guard.Receive, send: vllm_guard.Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at in range(0, len(data), 7):
            await send({"type": "http.response.body", "body": data[at : at + 7], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    for accept, media in ((b"application/x-gyre-frames", b"application/x-gyre-frames"), (b"*/*", b"text/event-stream; charset=utf-8")):
        sent: list[vllm_guard.Message] = []

        async def receive() -> vllm_guard.Message:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: vllm_guard.Message, sent: list[vllm_guard.Message] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/s3/inference/v1/generate", "query_string": b"", "headers": [(b"accept", accept)]}
        await vllm_guard.Guard(stream)(scope, receive, send)
        told = dict(sent[0]["headers"])
        assert (told[b"content-type"], told[b"x-gyre-version"]) == (media, b"4")
        body = b"".join(message["body"] for message in sent[1:])
        if media == accept:
            assert Frames().feed(body) == [TokenChunk([4, 5, 6], [-0.5, -1.5, -2.0], [4, 4, 4], "stop")]
        else:
            assert body == data


@pytest.mark.parametrize("told", [None, "default"])
async def test_an_answer_without_a_weight_version_is_a_fault(told: str | None) -> None:
    """Of a server that neither makes frames nor has the guard in front of it."""

    async def generate(request: web.Request) -> web.Response:
        headers = {} if told is None else {vllm_guard.HEADER: told}
        return web.Response(text=f"data: {json.dumps(_event(finish_reason='stop'))}\n\n", content_type="text/event-stream", headers=headers)

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    async with TestServer(app) as server:
        client = VllmClient(EngineAddress("vllm", str(server.make_url("")).rstrip("/"), 1, WINDOW))
        try:
            with pytest.raises(EngineFault, match="no weight version"):
                _ = [chunk async for chunk in client.generate(GenerateRequest("r", [1], Sampling(4)))]
        finally:
            await client.close()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([b"data: ", b"\n", b'{"choices":[{}]}', b'{"choices":3}', b"[DONE]"])), max_size=9
    )
)
def test_whatever_a_server_streams_is_frames_or_a_fault(parts: list[bytes]) -> None:
    translator = Translator(4)
    for item in Frames().feed(b"".join(map(translator.feed, parts))):
        assert isinstance(item, EngineFault)


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    engine = start_engine(EngineSpec("vllm", models[0], 0, 8, WINDOW, log, options={"kv_gib": 1, "max_num_batched_tokens": 256}), 280.0)
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.stop()


@pytest.fixture
async def client(server: VllmEngine) -> AsyncIterator[Any]:
    client = connect(server.address)
    yield client
    await client.close()


def request(name: str, count: int, **sampling: Any) -> GenerateRequest:
    rng = random.Random(name)
    return GenerateRequest(name, [rng.randrange(VOCABULARY) for _ in range(50)], Sampling(count, **sampling))


async def collect(client: Any, call: GenerateRequest) -> tuple[list[int], list[float], list[int], str | None]:
    tokens, logprobs, versions, finish = [], [], [], None
    async for chunk in client.generate(call):
        tokens.extend(chunk.tokens.tolist())
        logprobs.extend(chunk.logprobs.tolist())
        versions.extend(chunk.versions.tolist())
        finish = chunk.finish
    return tokens, logprobs, versions, finish


def deviation(model: Path, call: GenerateRequest, tokens: list[int], logprobs: list[float]) -> float:
    expected = plain_logprobs(model, list(call.prompt), tokens, call.sampling.temperature)
    return max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))


def sampled(server: VllmEngine) -> float:
    """Tokens so far, by its own count."""
    told = total(text(f"{server.address.url}/metrics", 30.0), "vllm:generation_tokens_total")
    assert told is not None
    return told


@pytest.mark.vllm
async def test_log_probs_stops_and_hand_over(server: VllmEngine, client: Any, models: tuple[Path, Path]) -> None:
    requests = [request(f"t{t}.{i}", 20 + i, temperature=t, seed=i) for t in (0.0, 0.7, 1.0) for i in range(3)]
    outcomes = await asyncio.gather(*(collect(client, call) for call in requests))
    for call, (tokens, logprobs, versions, finish) in zip(requests, outcomes, strict=True):
        assert (len(tokens), finish, set(versions)) == (call.sampling.max_tokens, "length", {0})
        assert deviation(models[0], call, tokens, logprobs) < TOLERANCE
    greedy = requests[2]
    tokens = (await collect(client, greedy))[0]
    for cut in (1, 9, 21):
        sampling = Sampling(22 - cut, 0.0)
        assert tokens[:cut] + (await collect(client, GenerateRequest("c", [*greedy.prompt, *tokens[:cut]], sampling, cut)))[0] == tokens
    free = (await collect(client, request("stop", 20, temperature=0.0)))[0]
    stopped = await collect(client, request("stop", 20, temperature=0.0, stop=(free[6],)))
    assert (stopped[0], stopped[3]) == (free[: free.index(free[6]) + 1], "stop")
    held = server.holding(10.0)
    assert held.kv_tokens >= held.executions * WINDOW > 0
    assert held.executions <= server.address.capacity


@pytest.mark.vllm
async def test_more_prompt_than_one_pass_takes(server: VllmEngine, client: Any, models: tuple[Path, Path]) -> None:
    """Prompts computed in pieces, sampled calls, more of them than rows."""
    requests = [request(f"p{i}", 3, seed=i) for i in range(100)]
    requests = [GenerateRequest(r.request_id, list(r.prompt) * 4, r.sampling) for r in requests]
    outcomes = await asyncio.gather(*(collect(client, call) for call in requests))
    for call, (tokens, logprobs, _, _) in zip(requests, outcomes, strict=True):
        assert len(tokens) == 3
        assert deviation(models[0], call, tokens, logprobs) < TOLERANCE


@pytest.mark.vllm
async def test_a_cancelled_call_leaves_and_strangers_get_nothing(server: VllmEngine, client: Any) -> None:
    before = sampled(server)
    stream = client.generate(request("long", 1900))
    await anext(stream)
    assert server.health(30.0)["in_flight"] == 1
    await stream.aclose()
    async with asyncio.timeout(30):
        while server.health(30.0)["in_flight"]:
            await asyncio.sleep(0.01)
        await collect(client, request("after", 3))  # it samples on, and what it sampled before is counted by then
        while (count := sampled(server) - before) < 4:
            await asyncio.sleep(0.01)
    assert count < 1900, "the call left long before it would have ended by itself"
    open_url = server.address.url.rsplit("/", 1)[0]
    async with aiohttp.ClientSession() as session, session.post(f"{open_url}/collective_rpc", json={"method": "x"}) as answer:
        assert answer.status == web.HTTPNotFound.status_code


@pytest.mark.vllm
async def test_updates_are_whole_and_pause_faults(server: VllmEngine, client: Any, models: tuple[Path, Path]) -> None:
    begun: dict[str, list[TokenChunk]] = {}

    async def under_way(call: GenerateRequest) -> None:
        async for chunk in client.generate(call):
            begun.setdefault(call.request_id, []).append(chunk)

    requests = {f"u{i}": request(f"u{i}", 200, seed=i) for i in range(8)}
    tasks = [asyncio.create_task(under_way(call)) for call in requests.values()]
    while len(begun) < len(tasks):
        await asyncio.sleep(0.001)
    await asyncio.to_thread(server.update_weights, models[1], 5, 30.0)
    faults = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if r is not None]
    assert faults
    assert all(isinstance(fault, EngineFault) for fault in faults)
    for name, chunks in begun.items():  # what had been delivered is of the old weights, and right
        tokens = [t for c in chunks for t in c.tokens.tolist()]
        assert {v for c in chunks for v in c.versions} == {0}
        assert deviation(models[0], requests[name], tokens, [x for c in chunks for x in c.logprobs.tolist()]) < TOLERANCE
    call = requests["u0"]
    tokens, logprobs, versions, _ = await collect(client, call)  # the same prompt: stale KV would show
    assert set(versions) == {5}
    assert deviation(models[1], call, tokens, logprobs) < TOLERANCE
    await asyncio.to_thread(server.pause, 10.0)
    with pytest.raises(EngineFault, match="503"):
        await collect(client, call)
    await asyncio.to_thread(server.release, 10.0)
    await asyncio.to_thread(server.restore, models[0], 6, 30.0)
    with pytest.raises(EngineFault, match="503"):
        await collect(client, call)
    await asyncio.to_thread(server.resume, 10.0)
    tokens, logprobs, versions, _ = await collect(client, call)
    assert set(versions) == {6}
    assert deviation(models[0], call, tokens, logprobs) < TOLERANCE


@pytest.mark.vllm
async def test_weights_that_are_received_are_those_of_the_files_or_nothing_changes(
    server: VllmEngine, client: Any, models: tuple[Path, Path]
) -> None:
    call = request("r", 40, temperature=0.0)
    old, new = (published(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) for path in models)
    await asyncio.to_thread(server.update_weights, models[1], 7, 30.0)
    from_files = await collect(client, call)
    await asyncio.to_thread(server.update_weights, models[0], 8, 30.0)
    before = await collect(client, call)
    with half_sender(9, new) as source, pytest.raises(NotReceived, match="did not arrive whole"):
        await asyncio.to_thread(server.receive_weights, source, 9, 30.0)
    assert await collect(client, call) == before, "tokens, log-probs and version are the old ones"
    sender = Sender("127.0.0.1", 9, new)
    await asyncio.to_thread(server.receive_weights, sender.source, 9, 30.0)
    assert sender.close().receivers == 1
    tokens, logprobs, versions, finish = await collect(client, call)
    assert (tokens, set(versions), finish) == (from_files[0], {9}, "length")
    assert max(abs(a - b) for a, b in zip(logprobs, from_files[1], strict=True)) < 1e-6
    sender = Sender("127.0.0.1", 10, old)
    await asyncio.to_thread(server.pause, 10.0)
    await asyncio.to_thread(server.receive_weights, sender.source, 10, 30.0)
    sender.close()
    assert server.health(5.0)["paused"], "as it was"
    await asyncio.to_thread(server.resume, 10.0)
    assert (await collect(client, call))[0] == before[0]


@pytest.mark.vllm
def test_weights_that_are_partly_old_are_caught_and_the_right_ones_pass(
    server: VllmEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    keeper = keeper_of(server, trained(models[1]))
    with pytest.raises(GyreError, match=r"engine 0 of cell 1 .* version 3 .* after loading .* again"):
        keeper.load(changed(models[1], models[0], "layers.1.", tmp_path / "mixed"), VERSION, 60.0)
    assert server.alive()
    keeper.load(models[1], VERSION, 60.0)
    keeper.release(60.0)
    keeper.load(models[1], VERSION, 60.0)
    assert server.health(5.0)["paused"], "asked while nobody may call it"
    keeper.resume(models[1], VERSION, 60.0)
    assert server.alive()
    server.update_weights(models[0], 0, 60.0)


@pytest.mark.vllm
def test_a_failed_update_ends_the_engine_with_all_its_processes(server: VllmEngine, tmp_path: Path) -> None:
    """The last test of this server."""
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(family) >= 2
    with pytest.raises(EngineFault, match="could not take version 9"):
        server.update_weights(tmp_path, 9, 30.0)
    assert not server.alive()
    assert [p.pid for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert isinstance(server.address, EngineAddress)
