"""The first look at a server of others: what can't be recorded exactly is refused with its remedy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_hpc.engines.probe import Wanted, examine
from gyre_hpc.engines.upstream import AS_IDS, AS_NAMES, OPENAI, VLLM, Wire
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.gateway.text.template import TurnRenderer
from tests.gateway.endpoint import Endpoint, endpoint
from tests.gateway.fakes import tiny_model

WIRE = Wire(OPENAI, "", lambda: 0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TurnRenderer:
    return TurnRenderer(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
async def server(renderer: TurnRenderer) -> AsyncIterator[Endpoint]:
    async with endpoint(renderer) as made:
        yield made


@pytest.fixture
def wanted(renderer: TurnRenderer) -> Wanted:
    ids = renderer.tokenizer.encode("The quick brown fox", add_special_tokens=False).ids
    return Wanted(2000, 1.0, ids, lambda tokens: str(renderer.tokenizer.decode(tokens, skip_special_tokens=False)), 5.0)


@pytest.mark.parametrize(("ids", "found"), [("names", AS_NAMES), ("ids", AS_IDS)])
async def test_the_way_to_ask_for_ids_is_found_out(server: Endpoint, wanted: Wanted, ids: str, found: str) -> None:
    server.ids = ids
    wire = await examine(server.url, WIRE, wanted)
    assert (wire.ids, wire.model) == (found, "their-model")
    assert (await examine(server.url, replace(WIRE, model="their-model"), wanted)).model == "their-model"


@pytest.mark.parametrize(
    ("switches", "change", "kind", "line"),
    [
        (
            {"ids": "none"},
            {},
            GyreError,
            "can't be recorded token by token: the server sent tokens as text, without their ids; it must take",
        ),
        ({"longest": 1000}, {}, ConfigError, "has a context of 1000 tokens, model.window is 2000; set model.window to 1000"),
        (
            {"raw": True},
            {"temperature": 0.5},
            ConfigError,
            "before the temperature, and rollout.temperature is 0.5; start vLLM with --logprobs",
        ),
        ({"key": "sesame"}, {}, ConfigError, "answered 401; set upstream.key_variable to the variable that holds its API key"),
        ({"bos": True}, {}, GyreError, "changes the prompt that it is given: 19 ids became 20"),
        ({"other_text": "something else"}, {}, ConfigError, "set model.path to its model"),
    ],
)
async def test_what_can_not_be_recorded_exactly_is_refused(
    server: Endpoint, wanted: Wanted, switches: dict[str, Any], change: dict[str, Any], kind: type[GyreError], line: str
) -> None:
    for name, value in switches.items():
        setattr(server, name, value)
    with pytest.raises(kind) as caught:
        await examine(server.url, WIRE, replace(wanted, **change))
    assert line in caught.value.line


async def test_log_probs_after_the_temperature_and_a_key_are_fine(server: Endpoint, wanted: Wanted) -> None:
    server.key = "sesame"
    wire = await examine(server.url, replace(WIRE, key="sesame"), replace(wanted, temperature=0.5))
    assert wire.key == "sesame"


async def test_another_model_and_another_kind_of_server(server: Endpoint, wanted: Wanted) -> None:
    with pytest.raises(ConfigError, match=r"serves their-model; upstream.model = 'another' must be one of them"):
        await examine(server.url, replace(WIRE, model="another"), wanted)
    with pytest.raises(GyreError, match=r"answered 404: .*; start vLLM with --enable-scale-out"):
        await examine(server.url, replace(WIRE, kind=VLLM), wanted)


async def test_a_server_that_does_not_answer_is_waited_for(wanted: Wanted, tmp_path: Path) -> None:
    with pytest.raises(Resumable, match=r"http://127.0.0.1:9/v1 did not answer within 0.3 s: .*; start the inference server first"):
        await examine("http://127.0.0.1:9/v1", WIRE, replace(wanted, deadline=0.3))


@pytest.mark.parametrize(
    ("lists", "line"),
    [
        (False, r"did not answer within 0\.3 s: .*; start the inference server first"),
        (True, r"gave no few tokens within 0\.3 s; see its log"),
    ],
)
async def test_a_server_that_accepts_and_says_nothing_is_given_up(wanted: Wanted, lists: bool, line: str) -> None:
    """It does not even list its models, or that alone."""
    silent = asyncio.Event()

    async def models(_: web.Request) -> web.Response:
        if not lists:
            await silent.wait()
        return web.json_response({"data": [{"id": "m", "max_model_len": 100_000}]})

    async def nothing(_: web.Request) -> web.Response:
        await silent.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", nothing)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(Resumable, match=line):
            await examine(f"http://127.0.0.1:{runner.addresses[0][1]}", WIRE, replace(wanted, deadline=0.3))
    finally:
        silent.set()
        await runner.cleanup()
