"""Fake of an inference server of others: /v1/models and /v1/completions with token ids, in the wire forms of vLLM and of SGLang.

It says prepared texts, greedily and for ever the same when there is none; log-probs are made up from the ids, so that a reader can check
them. Switches stand for what real servers do or can't do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from gyre_hpc.gateway.text.template import TurnRenderer


def logprob(token: int) -> float:
    """What this server gives for a token."""
    return -(token % 7) / 8


class Endpoint:
    """`ids`: names (vLLM) | ids (SGLang) | none; `key`: needed if set; `raw`: log-probs before the temperature; `gate` closed: calls wait.

    A call waits behind its first three tokens.
    """

    def __init__(self, renderer: TurnRenderer) -> None:
        self.renderer = renderer
        self.url = ""
        self.ids = "names"
        self.key = ""
        self.model = "their-model"
        self.longest = 4096
        self.raw = False
        self.bos = False
        """It puts a token of its own before every prompt."""
        self.broken = False
        """Its connections break, and new calls are refused."""
        self.pause = 0.0
        """Seconds between two chunks."""
        self.other_text = ""
        """How it reads its tokens, if not as ours."""
        self.version: object = "5"
        self.statuses: list[int] = []
        """To answer with, before anything else is said."""
        self.replies: list[str] = []
        self.said: list[list[int]] = []
        self.asked: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.get("/weight_info", self.weights),
        ]

    async def weights(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.longest}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        if not body["stream"]:
            return web.json_response({"choices": [self.probed(body)]})
        probe = body["temperature"] == 0.0 and body["max_tokens"] <= 4
        if not probe:
            self.asked.append(body)
            if self.broken:
                return web.json_response({"error": "it broke"}, status=503)
            if self.statuses:
                return web.json_response({"error": {"message": "busy"}}, status=self.statuses.pop(0))
        tokens = self.tokens(probe)[: body["max_tokens"]]
        finish = "stop" if tokens[-1] == self.renderer.turn_end else "length"
        if not probe:
            self.said.append(tokens)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(tokens), 3):
            last = at + 3 >= len(tokens)
            await self.send(response, body, tokens[at : at + 3], finish if last else None)
            if not probe:
                await asyncio.sleep(self.pause)
                await self.gate.wait()
                if self.broken and request.transport is not None:
                    request.transport.abort()
                    return response
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response

    def tokens(self, probe: bool) -> list[int]:
        text = "fox fox fox" if probe or not self.replies else self.replies.pop(0)
        return [*self.renderer.tokenizer.encode(text, add_special_tokens=False).ids, self.renderer.turn_end]

    async def send(self, response: web.StreamResponse, body: dict[str, Any], tokens: list[int], finish: str | None) -> None:
        names = [f"token_id:{t}" if self.ids == "names" and body.get("return_tokens_as_token_ids") else "x" for t in tokens]
        told = {"tokens": names, "token_logprobs": [logprob(t) for t in tokens]}
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": told, "finish_reason": finish}
        if self.ids == "ids" and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def probed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The plain answers that a first look asks for."""
        divide = 1.0 if self.raw else body["temperature"] or 1.0
        tops = {f"token_id:{t}": -1.0 * n / divide for n, t in enumerate((65, 66, 67, 68))}
        tokens = self.tokens(probe=True)[: body["max_tokens"]]
        text = self.renderer.tokenizer.decode(tokens, skip_special_tokens=False)
        prompt = [1, *body["prompt"]] if self.bos else body["prompt"]
        text = self.other_text or text
        choice = {"text": text, "token_ids": tokens, "prompt_token_ids": prompt, "logprobs": {"top_logprobs": [tops]}}
        return choice if self.ids != "none" else {"text": text, "logprobs": {"top_logprobs": [tops]}}


@asynccontextmanager
async def endpoint(renderer: TurnRenderer) -> AsyncIterator[Endpoint]:
    """One that listens."""
    made = Endpoint(renderer)
    app = web.Application()
    app.add_routes(made.routes())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield made
    finally:
        made.gate.set()
        await runner.cleanup()
