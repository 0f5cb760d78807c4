"""The small interface behind which every inference engine stands.

Two sides. The *client* (in the gateway) asks for tokens; the *server handle* (in the cell's leader) owns the engine process.
Invariants:
- token in, token out: prompts and results are ids; the engine never sees text and never echoes the prompt;
- a call is continued on any engine by prompt + tokens generated so far, with `position` telling how many of them were generated:
  the draw for generated token i depends only on (seed, i) and the distribution, so a hand-over is invisible;
- every token carries the weight version that sampled it; an update never leaves an engine half new: after `update_weights`
  returned, the engine's KV of older versions is gone;
- log-probs are those of the sampled distribution with the temperature applied, and before top-p/top-k cuts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
NIXL = "nixl"
"""`handover` of engines that give KV to one another."""


@dataclass(frozen=True)
class Sampling:
    """How to draw. `temperature` 0 is greedy (log-probs then of temperature 1). `seed` of one call, `stop` ends it (and is included)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ticket:
    """What a source keeps pinned: the KV of exactly `tokens` under weights `version`, to be pulled before `until`.

    `params`: the engine's own words for it, handed on unchanged.
    """

    tokens: Sequence[int]
    version: int
    until: float
    params: Mapping[str, Any]

    def check(self, prompt: Sequence[int], now: float) -> None:
        """Raises Doubt: a pull for this prompt at this time would be answered, and wrong."""
        if now >= self.until:
            raise Doubt("late", f"the pinned KV is {now - self.until:.1f} s past our deadline")
        if prompt is not self.tokens and list(prompt) != list(self.tokens):
            raise Doubt("prompt", f"a prompt of {len(prompt)} tokens is not the pinned one of {len(self.tokens)}")


@dataclass(frozen=True)
class GenerateRequest:
    """`prompt`: token ids, ending with the `position` tokens that this call generated earlier on another engine (or weights).

    The gateway's is a `Prompt` (prompt.py), whose JSON costs what is new in it: clients write it with `request_json`.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    position: int = 0
    ticket: Ticket | None = None
    """Of an engine that keeps the prompt's KV pinned for this request: only to engines whose address says `handover`."""


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """Some tokens in order, one log-prob (nats) and one weight version each. `finish` is set on the last chunk: "stop" or "length".

    Any sequences are taken, arrays of these types as they are (never changed afterwards): a chunk costs the same with 8 tokens and 6,000.
    `exact`: on the last chunk, from engines that tell it only then: the versions of all tokens of this request, in place of those so far.
    """

    tokens: Ids
    logprobs: Logprobs
    versions: Ids
    finish: str | None = None
    exact: Ids | None = None

    def __post_init__(self) -> None:
        for name, kind in _COLUMNS:
            given = getattr(self, name)
            if given is not None and given.__class__ is not np.ndarray:
                object.__setattr__(self, name, np.asarray(given, kind))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenChunk) or self.finish != other.finish or (self.exact is None) != (other.exact is None):
            return False
        pairs = [(getattr(self, name), getattr(other, name)) for name, _ in _COLUMNS]
        return all(one is other or np.array_equal(one, other) for one, other in pairs)

    __hash__ = None  # type: ignore[assignment]


_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("tokens", np.int32),
    ("logprobs", np.float32),
    ("versions", np.int32),
    ("exact", np.int32),
)


def joined(parts: Sequence[TokenChunk]) -> TokenChunk:
    """At least one chunk, in order, as one; `finish` and `exact` are those of the last."""
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs = np.concatenate([part.tokens for part in parts]), np.concatenate([part.logprobs for part in parts])
    return TokenChunk(tokens, logprobs, np.concatenate([part.versions for part in parts]), parts[-1].finish, parts[-1].exact)


def merged(items: Sequence[TokenChunk | BaseException]) -> list[TokenChunk | BaseException]:
    """Chunks that follow one another as one, up to what is none."""
    if len(items) == 1:
        return list(items)
    found: list[TokenChunk | BaseException] = []
    parts: list[TokenChunk] = []
    for item in items:
        if isinstance(item, TokenChunk):
            parts.append(item)
            if item.finish is None and item.exact is None:
                continue
        if parts:
            found.append(joined(parts))
            parts = []
        if not isinstance(item, TokenChunk):
            found.append(item)
    return [*found, joined(parts)] if parts else found


class EngineFault(Exception):
    """The engine broke, vanished or refused. What it had delivered stays valid; the caller continues elsewhere or fails."""


class EngineUnreachable(EngineFault):
    """No connection could be made: the engine is dead, or its node; no call is to blame for that."""


class RequestRefused(EngineFault):
    """No engine with this window and vocabulary would serve this request: trying elsewhere is useless."""


class NotReceived(EngineFault):
    """Weights did not arrive whole: the engine has those that it had, or takes no calls until it has loaded a version from files."""


class Doubt(EngineFault):
    """This KV may not be what it should be: it is computed again. `reason`: one word, counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class EngineClient(Protocol):
    """Generates on one engine. Closing the iterator (`aclose`) cancels the call at the engine within 0.1 s."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yields chunks as they come; raises EngineFault. `sampling.max_tokens` counts from this request's prompt end."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine answers; what the controller puts into the gateway's routes."""

    kind: str
    url: str
    capacity: int
    """Executions that this engine can hold at once."""
    window: int
    """Tokens of context, prompt and output together."""
    handover: str = "recompute"
    """How KV gets from and to this engine (handover.py)."""


@dataclass(frozen=True)
class EngineSpec:
    """All that is needed to start an engine, whatever its kind."""

    kind: str
    model: Path
    version: int
    capacity: int
    """0: as many as the engine itself says (`EngineServer.holding`)."""
    window: int
    log: Path
    host: str = "127.0.0.1"
    dtype: str = "float32"
    threads: int = 1
    options: dict[str, object] = field(default_factory=dict)
    handover: str = "recompute"
    devices: tuple[int, ...] = ()
    """Accelerators of the node that this engine may see, by number; empty: all that the process sees."""


@dataclass(frozen=True)
class Holding:
    """What an engine says that it can hold: `kv_tokens` of KV cache in all, `executions` whose context fills the window at once."""

    kv_tokens: int
    executions: int


class EngineServer(Protocol):
    """One engine process, owned by a rank of its cell. All calls block with a deadline (seconds) and raise EngineFault."""

    address: EngineAddress
    pid: int

    def alive(self) -> bool: ...

    def holding(self, deadline: float) -> Holding:
        """As the engine itself measures it, now that it runs."""
        ...

    def health(self, deadline: float) -> dict[str, Any]:
        """What the process says of itself: `version` and `paused` at least."""
        ...

    def pause(self, deadline: float) -> None:
        """Stop serving; requests in flight are refused with EngineFault at their client (the gateway keeps and moves them)."""
        ...

    def resume(self, deadline: float) -> None: ...

    def update_weights(self, model: Path, version: int, deadline: float) -> None:
        """Load a Hugging Face directory's weights as `version`; drops every KV of older versions. Checked by reading the version back."""
        ...

    def receive_weights(self, source: str, version: int, deadline: float) -> None:
        """As `update_weights`, from a sender (weight_stream.py, weight_broadcast.py).

        Raises NotReceived where the engine stays as it was, or, from a broadcast, paused until `update_weights`. What is sent has half of
        `deadline`, so that after NotReceived there is time left to load files.
        """
        ...

    def release(self, deadline: float) -> None:
        """Free the memory that training needs (weights, KV); the process stays."""
        ...

    def restore(self, model: Path, version: int, deadline: float) -> None:
        """Undo `release` with these weights. Paused or not, as it was before `release`."""
        ...

    def logprobs(self, tokens: Sequence[int], deadline: float) -> list[float]:
        """Nats of tokens[1:], each after those before it, at temperature 1, under the weights that it has; also while it is paused."""
        ...

    def stop(self) -> None: ...
