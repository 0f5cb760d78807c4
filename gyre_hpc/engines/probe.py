"""Looks at a server of others before the first call goes there: does it give what an exact record needs?

Asked are its models, and for a few tokens, which costs it nothing. Refused, each with its remedy: another model or a shorter context than
configured; no ids or no log-probs in the answer; a tokenizer other than the configured one; log-probs before the temperature where
another temperature than 1 is asked for (vLLM's default), which are not those that the tokens were drawn with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from gyre_hpc.engines.names import connector
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, GenerateRequest, RequestRefused, Sampling
from gyre_hpc.engines.upstream import AS_IDS, AS_NAMES, OPENAI, VLLM, UpstreamClient, Wire, request_body, root_of
from gyre_hpc.errors import ConfigError, GyreError, Resumable

log = logging.getLogger(__name__)
TOKENS = 4
"""Asked for, and sampled greedily."""
_PAUSE = 1.0
_TOLD = 0.05
"""Nats between two log-probs at two temperatures from which on they tell something."""


@dataclass(frozen=True)
class Wanted:
    """What is expected. `prompt`: some ids to begin with; `decode`: ids -> text by the configured tokenizer."""

    window: int
    temperature: float
    prompt: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    deadline: float
    """Seconds in which the server must answer."""


async def examine(url: str, wire: Wire, wanted: Wanted) -> Wire:
    """The way to speak to this server, completed. GyreError: why it can't be used; Resumable: it doesn't answer."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with aiohttp.ClientSession(connector=connector(force_close=True), timeout=timeout, headers=wire.headers) as session:
        wire = replace(wire, model=_model(url, wire, wanted, await _models(session, url, wanted.deadline)))
        try:
            async with asyncio.timeout(wanted.deadline):
                wire = await _speaking(session, url, wire, wanted)
                if wanted.temperature not in (0.0, 1.0):
                    await _check_temperature(session, url, wire, wanted)
        except TimeoutError:
            remedy = "see its log: it may hang, or have much else to do (deadlines.start); the same command goes on"
            raise Resumable(f"{url} gave no few tokens within {wanted.deadline:g} s", remedy) from None
        except aiohttp.ClientError as error:
            raise Resumable(f"{url} broke off: {type(error).__name__} {error}".strip(), "see its log; the same command goes on") from None
    return wire


async def _models(session: aiohttp.ClientSession, url: str, deadline: float) -> list[dict[str, Any]]:
    """What the server lists, as soon as it answers."""
    until, told, why = time.monotonic() + deadline, False, ""
    while True:
        try:
            limit = aiohttp.ClientTimeout(total=max(0.1, until - time.monotonic()), sock_connect=10.0)
            async with session.get(f"{root_of(url)}/v1/models", timeout=limit) as answer:
                if answer.status in (401, 403):
                    raise ConfigError(f"{url} answered {answer.status}", "set upstream.key_variable to the variable that holds its API key")
                if answer.status == 200:
                    return [dict(entry) for entry in (await answer.json(content_type=None))["data"]]
                why = f"GET /v1/models answered {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = f"{type(error).__name__} {error}".strip()
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{url}: GET /v1/models is no list of models", "give the URL of an OpenAI-compatible server") from None
        left = until - time.monotonic()
        if left <= 0:
            raise Resumable(f"{url} did not answer within {deadline:g} s: {why}", "start the inference server first; see upstream.urls")
        if not told and left < deadline / 2:
            told = True
            log.warning("waiting for %s: %s", url, why)
        await asyncio.sleep(min(_PAUSE, left))


def _model(url: str, wire: Wire, wanted: Wanted, models: list[dict[str, Any]]) -> str:
    names = [str(entry.get("id")) for entry in models]
    if not names or (wire.model and wire.model not in names):
        raise ConfigError(
            f"{url} serves {', '.join(names) or 'no model'}", f"upstream.model = {wire.model!r} must be one of them, or empty"
        )
    entry = models[names.index(wire.model)] if wire.model else models[0]
    longest = entry.get("max_model_len")
    if isinstance(longest, int) and longest < wanted.window:
        raise ConfigError(f"{url} has a context of {longest} tokens, model.window is {wanted.window}", f"set model.window to {longest}")
    return str(entry["id"])


async def _speaking(session: aiohttp.ClientSession, url: str, wire: Wire, wanted: Wanted) -> Wire:
    """With the way in which the server gives ids; a few tokens are asked for in each."""
    faults = []
    for ids in (AS_NAMES, AS_IDS) if wire.kind == OPENAI else (wire.ids,):
        tried = replace(wire, ids=ids)
        try:
            tokens = await _few(url, tried, wanted)
        except EngineFault as error:
            faults.append(str(error))
            if isinstance(error, RequestRefused):
                break
            continue
        if not tokens or max(tokens) >= 1 << 31:
            faults.append(f"ids {tokens}")
            continue
        await _check_tokenizer(session, url, tried, wanted)
        return tried
    remedy = {
        OPENAI: "it must take token ids and give ids and log-probs: vLLM from 0.10.2, or SGLang with return_token_ids",
        VLLM: "start vLLM with --enable-scale-out, or set upstream.kind to openai",
    }[wire.kind]
    raise GyreError(f"{url} can't be recorded token by token: {'; '.join(dict.fromkeys(faults))}", remedy)


async def _few(url: str, wire: Wire, wanted: Wanted) -> list[int]:
    client = UpstreamClient(EngineAddress(wire.kind, url, 1, wanted.window), wire)
    tokens: list[int] = []
    try:
        async with aclosing(client.generate(_greedy(wanted, TOKENS))) as chunks:
            async for chunk in chunks:
                tokens.extend(chunk.tokens.tolist())
    finally:
        await client.close()
    return tokens


async def _check_tokenizer(session: aiohttp.ClientSession, url: str, wire: Wire, wanted: Wanted) -> None:
    """Its text of some ids is ours; where it echoes the prompt's ids, they are those that were sent."""
    if wire.kind == VLLM:
        return  # it has no text
    body = {**orjson.loads(request_body(_greedy(wanted, TOKENS), wanted.window, replace(wire, ids=AS_IDS))), "stream": False}
    async with session.post(f"{root_of(url)}/v1/completions", json=body) as answer:
        choice = (await answer.json(content_type=None))["choices"][0] if answer.status == 200 else {}
    echoed, ids, text = choice.get("prompt_token_ids"), choice.get("token_ids"), choice.get("text")
    if echoed and list(echoed) != list(wanted.prompt):
        raise GyreError(f"{url} changes the prompt that it is given: {len(wanted.prompt)} ids became {len(echoed)}", "nothing may be added")
    ours = wanted.decode(ids) if ids else ""
    if not isinstance(text, str) or "\ufffd" in ours + text or not ours.strip() or not text.strip():
        return
    if ours.strip() != text.strip():
        raise ConfigError(f"{url} reads its tokens as {text!r}, the tokenizer of model.path as {ours!r}", "set model.path to its model")


async def _check_temperature(session: aiohttp.ClientSession, url: str, wire: Wire, wanted: Wanted) -> None:
    """Two log-probs are further apart at a lower temperature, if they are those of the distribution that is sampled."""
    plain, tempered = [await _tops(session, url, wire, wanted, temperature) for temperature in (1.0, wanted.temperature)]
    both = sorted(plain.keys() & tempered.keys(), key=lambda name: -plain[name])
    gaps = [(plain[both[0]] - plain[name], tempered[both[0]] - tempered[name]) for name in both[1:]]
    telling = [(at_one, at_t) for at_one, at_t in gaps if abs(at_one - at_one / wanted.temperature) > _TOLD]
    if not telling:
        log.warning("%s: whether its log-probs are those of temperature %g can't be told", url, wanted.temperature)
    elif all(abs(at_one - at_t) < abs(at_one / wanted.temperature - at_t) for at_one, at_t in telling):
        raise ConfigError(
            f"{url} gives log-probs before the temperature, and rollout.temperature is {wanted.temperature:g}",
            "start vLLM with --logprobs-mode processed_logprobs, or set rollout.temperature to 1",
        )


async def _tops(session: aiohttp.ClientSession, url: str, wire: Wire, wanted: Wanted, temperature: float) -> dict[str, float]:
    """Log-probs of the likeliest first tokens, by token."""
    body = {**orjson.loads(request_body(_greedy(wanted, 1), wanted.window, wire)), "stream": False}
    if wire.kind == VLLM:
        body["sampling_params"] |= {"temperature": temperature, "logprobs": 5}
        path = "/inference/v1/generate"
    else:
        body |= {"temperature": temperature, "logprobs": 5}
        path = "/v1/completions"
    async with session.post(root_of(url) + path, json=body) as answer:
        if answer.status != 200:
            return {}
        told = (await answer.json(content_type=None))["choices"][0]["logprobs"]
    if wire.kind == VLLM:
        return {str(top["token_id"]): float(top["logprob"]) for top in told["content"][0]["top_logprobs"]}
    return {str(name): float(value) for name, value in told["top_logprobs"][0].items()}


def _greedy(wanted: Wanted, count: int) -> GenerateRequest:
    return GenerateRequest("probe", list(wanted.prompt), Sampling(count, 0.0))
