"""Calls to a vLLM engine (vllm_engine.py), by token ids.

What a hand-over between two vLLM engines preserves: greedy calls continue exactly (up to ties within rounding). Sampled calls continue with
the right distribution but other draws than an undisturbed call would have had: vLLM's per-request generator has no position, so each
stretch of a call gets the seed hash(seed, position). On CPU not even that: 0.32.0 dies of a seeded call whose prompt is computed in pieces
("CPU Generator does not use offset"), so calls there draw from the engine's one generator, which every engine seeds differently (equal
ones would give the executions of a group equal tokens).

With `handover: nixl` a call may bring a ticket for KV that another engine keeps pinned (handover.py); the server then pulls it.

Log-probs are vLLM's `processed_logprobs`: temperature applied, but top-p/top-k as well. The interface promises them before cuts, so a
call with cuts is refused here.
"""

from __future__ import annotations

import time

import aiohttp
import numpy as np

from gyre_hpc.engines import frames, vllm_guard
from gyre_hpc.engines.handover_nixl import pull_fields
from gyre_hpc.engines.options import on_cpu
from gyre_hpc.engines.prompt import request_json
from gyre_hpc.engines.protocol import Doubt, EngineAddress, EngineFault, GenerateRequest, RequestRefused
from gyre_hpc.engines.sampling import seed_key, uniforms
from gyre_hpc.engines.streaming import Lines, Question, Reader, StreamingClient, session
from gyre_hpc.engines.vllm_wire import parse_line


class VllmClient(StreamingClient):
    """An `EngineClient` over `/inference/v1/generate`.

    With a ticket `generate` also raises Doubt, where its KV must not be pulled for this request.
    """

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(f"{address.url}/inference/v1/generate", "vLLM", session(keepalive=4.0))
        self._window = address.window
        self._seeded = not on_cpu()

    def _question(self, request: GenerateRequest) -> Question:
        headers = {"Content-Type": "application/json", "Accept": frames.MEDIA}
        body = request_body(request, self._window, self._seeded)
        if request.ticket is not None:
            request.ticket.check(request.prompt, time.monotonic())
            headers[vllm_guard.KV_HEADER] = str(request.ticket.version)
        return Question(body, _reader, headers)

    def _refusal(self, status: int, reason: str) -> Exception:
        if status == vllm_guard.OTHER_VERSION:
            return Doubt("version", reason)
        return (RequestRefused if status in (400, 422) else EngineFault)(f"vLLM answered {status}: {reason}")


def _reader(response: aiohttp.ClientResponse) -> Reader:
    """Of frames, where the guard is one that makes them. Raises EngineFault."""
    if response.headers.get("Content-Type") == frames.MEDIA:
        return frames.Frames()
    told = response.headers.get(vllm_guard.HEADER, "")
    if not told.isdecimal():
        raise EngineFault(f"vLLM's answer tells no weight version ({vllm_guard.HEADER}: {told!r}): its guard is not in front of it")
    version = int(told)
    return Lines(lambda line: parse_line(line, version))


def request_body(request: GenerateRequest, window: int, seeded: bool) -> bytes:
    """The JSON of one call; `seeded`: with a seed of its own. Raises RequestRefused for what vLLM can't do as promised."""
    s = request.sampling
    room = window - len(request.prompt)
    if room < 1 or not len(request.prompt):
        raise RequestRefused(f"prompt of {len(request.prompt)} tokens, window of {window}")
    if s.top_p < 1.0 or s.top_k > 0:
        raise RequestRefused("vLLM reports log-probs after top-p and top-k: sample with top_p 1 and top_k 0, or use the torch engine")
    sampling: dict[str, object] = {
        "max_tokens": min(s.max_tokens, room),
        "temperature": s.temperature,
        "stop_token_ids": list(s.stop),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if seeded and s.temperature > 0:
        key = np.array([seed_key(s.seed)], dtype=np.uint64)
        sampling["seed"] = int(uniforms(key, np.array([request.position]))[0] * 2.0**52)
    rest = {"sampling_params": sampling, "stream": True, **({} if request.ticket is None else pull_fields(request.ticket))}
    return request_json("token_ids", request.prompt, rest)
