"""A client for inference servers of others: token ids in, token ids and log-probs out, over what vLLM and SGLang serve.

Two wire forms. `openai`: /v1/completions with a prompt of ids; the sampled ids come as `token_ids` (`return_token_ids`), or as tokens
named `token_id:N` (`return_tokens_as_token_ids`, which doesn't echo the prompt: at 700K tokens that costs more than everything else).
`vllm`: /inference/v1/generate, which tells the weight version of every token, but only with the last one.
Invariants: nothing is sampled by a server's defaults (a model's own generation_config.json would cut the distribution in silence): every
knob is sent; an id or a log-prob that is missing is a fault, never guessed; the API key is sent, and never logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from gyre_hpc.engines.prompt import request_json
from gyre_hpc.engines.protocol import EngineAddress, EngineFault, GenerateRequest, Ids, RequestRefused, TokenChunk
from gyre_hpc.engines.streaming import Lines, Question, StreamingClient, ids_of, logprobs_of, session, sound

OPENAI, VLLM = "openai", "vllm"
AS_NAMES, AS_IDS = "return_tokens_as_token_ids", "return_token_ids"
"""How a server is asked for ids; which of the two it knows is found out at the start."""
_NAMED = "token_id:"
_LONGEST = 1 << 26
"""Tokens of a call from which on it is damage."""
_REFUSALS = frozenset({400, 401, 403, 404, 422})


@dataclass(frozen=True)
class Wire:
    """How one server is spoken to. `version`: the weights that it has now, as far as we know; `key`: its API key or ""."""

    kind: str
    model: str
    version: Callable[[], int]
    key: str = ""
    ids: str = AS_NAMES

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}

    def __repr__(self) -> str:
        return f"Wire({self.kind}, {self.model})"  # without the key


class UpstreamClient(StreamingClient):
    """An `EngineClient`."""

    def __init__(self, address: EngineAddress, wire: Wire) -> None:
        url = root_of(address.url) + ("/inference/v1/generate" if wire.kind == VLLM else "/v1/completions")
        # servers close idle connections after 5 s (uvicorn's default): a call must not go out on one that is being closed
        super().__init__(url, url, session(keepalive=4.0))
        self._wire = wire
        self._window = address.window

    def _question(self, request: GenerateRequest) -> Question:
        return Question(request_body(request, self._window, self._wire), lambda _: Lines(counted(self._wire)), self._wire.headers)

    def _refusal(self, status: int, reason: str) -> Exception:
        line = f"{self._url} answered {status}: {' '.join(reason.split())}"
        return (RequestRefused if status in _REFUSALS else EngineFault)(line)

    def _lost(self, error: Exception) -> EngineFault:
        """A fault like any other: nobody starts a server of others again, so a call does not wait for that."""
        return EngineFault(f"connection to {self._url}: {type(error).__name__} {error}")


def counted(wire: Wire) -> Callable[[bytes], TokenChunk | None]:
    """`read_line` for one answer, whose tokens must be as many as the server tells versions of."""
    sampled = 0

    def parse(line: bytes) -> TokenChunk | None:
        nonlocal sampled
        chunk = read_line(line, wire)
        if chunk is not None:
            sampled += len(chunk)
            if chunk.exact is not None and len(chunk.exact) != sampled:
                raise EngineFault(f"the server told the versions of {len(chunk.exact)} tokens, it sent {sampled}")
        return chunk

    return parse


def root_of(url: str) -> str:
    """The URL of a server without the `/v1` that people give with it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def request_body(request: GenerateRequest, window: int, wire: Wire) -> bytes:
    """The JSON of one call. Raises RequestRefused."""
    s = request.sampling
    room = window - len(request.prompt)
    if room < 1 or len(request.prompt) == 0:
        raise RequestRefused(f"prompt of {len(request.prompt)} tokens, window of {window}")
    if s.top_p < 1.0 or s.top_k > 0:
        raise RequestRefused("servers report log-probs after top-p and top-k: sample with top_p 1 and top_k 0")
    sampling: dict[str, object] = {
        "max_tokens": min(s.max_tokens, room),
        "temperature": s.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(s.stop),
        "ignore_eos": True,
        "logprobs": 0,
    }
    if wire.kind == VLLM:
        name: str = "token_ids"
        rest: dict[str, object] = {"sampling_params": {**sampling, "detokenize": False}}
    else:
        name, rest = "prompt", {**sampling, wire.ids: True, "skip_special_tokens": False}
    return request_json(name, request.prompt, {"model": wire.model, **rest, "stream": True})


def read_line(line: bytes, wire: Wire) -> TokenChunk | None:
    """One line of an answer: an event, or nothing. Raises EngineFault, or what an event of another form raises."""
    if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
        return None
    return parse_chunk(orjson.loads(data), wire)


def parse_chunk(item: dict[str, Any], wire: Wire) -> TokenChunk | None:
    """One server-sent event, None when it has no tokens. Raises EngineFault for errors, aborts, and what can't be recorded exactly."""
    if item.get("error") or "choices" not in item:
        raise EngineFault(f"the server says: {str(item.get('error', item))[:300]}")
    if not item["choices"]:
        return None
    choice = item["choices"][0]
    finish = choice.get("finish_reason")
    if finish not in (None, "stop", "length"):
        raise EngineFault(f"the server ended the call: {finish}")
    tokens, logprobs = _sampled(choice, wire)
    if not tokens and finish is None:
        return None
    versions = np.full(len(tokens), wire.version(), np.int32)
    return sound(TokenChunk(ids_of(tokens), logprobs_of(logprobs), versions, finish, _exact(choice)))


def _sampled(choice: dict[str, Any], wire: Wire) -> tuple[list[int], list[Any]]:
    told = choice.get("logprobs") or {}
    if wire.kind == VLLM:
        return choice.get("token_ids") or [], [entry["logprob"] for entry in told.get("content") or []]
    names = told.get("tokens") or []
    tokens = choice.get("token_ids")
    if tokens is None and all(name.startswith(_NAMED) for name in names):
        tokens = orjson.loads("[" + ",".join(names).replace(_NAMED, "") + "]")
    if tokens is None:
        raise EngineFault("the server sent tokens as text, without their ids")
    return tokens, told.get("token_logprobs") or []


def _exact(choice: dict[str, Any]) -> Ids | None:
    """The version of every token of the call, where the server tells it by number. Raises EngineFault."""
    spans = choice.get("weight_versions")
    if not spans or not all(str(span["version"]).isdecimal() for span in spans):
        return None
    starts, ends = [span["start"] for span in spans], [span["end"] for span in spans]
    if [*starts, ends[-1]] != [0, *ends] or not 0 <= ends[-1] < _LONGEST:
        raise EngineFault(f"the server told versions of spans that do not follow one another: {str(spans)[:200]}")
    return np.repeat(np.array([int(span["version"]) for span in spans], np.int32), [span["end"] - span["start"] for span in spans])
