"""Continuous batching for `SlotModel`: calls join and leave between steps, every step gives each active call one token.

Invariants:
- an active row i has the KV of all its tokens but the last in slot i; a waiting call has none;
- every token carries the version of the weights that computed its distribution; `replace` re-prefills what is in flight under the new
  weights, so no distribution ever mixes KV of two versions;
- a token is handed out exactly once, in order; `finish` comes with the last one.
Single-threaded: one thread calls everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from gyre_hpc.engines.prefixes import PrefixCache
from gyre_hpc.engines.protocol import GenerateRequest, TokenChunk
from gyre_hpc.engines.sampling import draw, seed_key, uniforms
from gyre_hpc.engines.slots import KV, SlotCache
from gyre_hpc.engines.torch_model import Piece, SlotModel


@dataclass(slots=True)
class _Call:
    """A request on its way. `left` tokens may still be drawn; the lists are drawn but not handed out yet."""

    request: GenerateRequest
    tokens: list[int]
    left: int
    key: int
    index: int
    stop: frozenset[int]
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """`rows` calls at once, `window` tokens each; at most `prefill` prompt tokens a pass; chunks of `flush` tokens."""

    rows: int
    window: int
    flush: int = 8
    prefill: int = 4096
    prefix_bytes: int = 256 << 20


class Batch:
    """The calls of one engine and the KV they need."""

    def __init__(self, model: SlotModel, version: int, limits: Limits) -> None:
        self.model: SlotModel | None = model
        self.version = version
        self._limits = limits
        self._cache = SlotCache(limits.window, model.device)
        self._prefixes = PrefixCache(limits.prefix_bytes)
        self._waiting: deque[_Call] = deque()
        self._active: list[_Call] = []
        self._table: _Table | None = None
        self.tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def ready(self) -> bool:
        """Whether `step` has something to do and weights to do it with."""
        return self.model is not None and self.busy

    @property
    def counts(self) -> dict[str, int]:
        calls = {"active": len(self._active), "waiting": len(self._waiting), "tokens": self.tokens, "prefix_hits": self._prefixes.hits}
        return {**calls, "slot_bytes": self._cache.size, "prefix_bytes": self._prefixes.size}

    def refusal(self, request: GenerateRequest) -> str | None:
        """Why this request can never be served, or None."""
        if not request.prompt:
            return "empty prompt"
        if len(request.prompt) >= self._limits.window:
            return f"prompt of {len(request.prompt)} tokens, window of {self._limits.window}"
        if request.sampling.max_tokens < 1:
            return f"max_tokens = {request.sampling.max_tokens}"
        if self.model is not None and not 0 <= min(request.prompt) <= max(request.prompt) < self.model.vocabulary:
            return f"a token id outside 0..{self.model.vocabulary - 1}"
        return None

    def add(self, request: GenerateRequest) -> None:
        """Queue a request that `refusal` accepts."""
        s = request.sampling
        left = min(s.max_tokens, self._limits.window - len(request.prompt))
        self._waiting.append(_Call(request, list(request.prompt), left, seed_key(s.seed), request.position, frozenset(s.stop)))

    def cancel(self, request_id: str) -> None:
        """Forget a call; unknown or finished ones are none of our business."""
        for row, call in enumerate(self._active):
            if call.request.request_id == request_id:
                self._leave([row])
                return
        self._waiting = deque(call for call in self._waiting if call.request.request_id != request_id)

    def drop_all(self) -> list[str]:
        """Forget every call and return their ids."""
        dropped = [call.request.request_id for call in (*self._active, *self._waiting)]
        self._active.clear()
        self._waiting.clear()
        self._table = None
        return dropped

    def replace(self, model: SlotModel | None, version: int) -> None:
        """Change the weights (None: hold none until the next call); all KV goes, calls in flight start over from their tokens."""
        self._waiting.extendleft(reversed(self._active))
        self._active.clear()
        self._table = None
        self._prefixes.clear()
        self._cache.free()
        self.model, self.version = model, version

    def step(self) -> list[tuple[str, TokenChunk]]:
        """Admit what fits, draw one token for every active call; returns the chunks that are ready, by request id."""
        if self.model is None:
            raise RuntimeError("step without weights")
        ready: list[tuple[str, TokenChunk]] = []
        for low, logits in self._admit(self.model):
            self._draw(logits, _Table(self._active[low : low + len(logits)]), low, ready)
        self._leave(self._finished(ready))
        if self._active:
            if self._table is None:
                self._table = _Table(self._active)
            logits = self.model.decode(self._cache, 0, self._table.last, self._table.position)
            self._draw(logits, self._table, 0, ready)
            self._leave(self._finished(ready))
        return ready

    def _admit(self, model: SlotModel) -> Iterable[tuple[int, torch.Tensor]]:
        """Give free slots to waiting calls and compute their prompts; yields (first slot, logits of its rows) per forward pass."""
        room = min(self._limits.rows - len(self._active), len(self._waiting))
        joining = [(call, self._prefixes.longest(call.tokens)) for call in (self._waiting.popleft() for _ in range(room))]
        # rows of one pass should be about equally long
        joining.sort(key=lambda pair: len(pair[0].tokens) - (pair[1][1] if pair[1] else 0))
        group: list[tuple[_Call, tuple[KV, int] | None]] = []
        for pair in joining:
            new = len(pair[0].tokens) - (pair[1][1] if pair[1] else 0)
            if group and (len(group) + 1) * new > self._limits.prefill:
                yield self._prefill(model, group)
                group = []
            group.append(pair)
        if group:
            yield self._prefill(model, group)

    def _prefill(self, model: SlotModel, group: list[tuple[_Call, tuple[KV, int] | None]]) -> tuple[int, torch.Tensor]:
        low = len(self._active)
        self._table = None
        starts: list[int] = []
        self._cache.reserve(low + len(group), max(len(call.tokens) for call, _ in group))
        for row, (call, hit) in enumerate(group, low):
            self._active.append(call)
            if hit is not None:
                self._cache.load(row, *hit)
            starts.append(hit[1] if hit is not None else 0)
        if len(group) == 1:  # a prompt longer than one pass goes in pieces
            tokens = group[0][0].tokens
            while len(tokens) - starts[0] > self._limits.prefill:
                end = starts[0] + self._limits.prefill
                model.forward(self._cache, Piece(low, [tokens[starts[0] : end]], starts))
                starts = [end]
        piece = Piece(low, [call.tokens[start:] for (call, _), start in zip(group, starts, strict=True)], starts)
        return low, model.forward(self._cache, piece)

    def _draw(self, logits: torch.Tensor, table: _Table, low: int, ready: list[tuple[str, TokenChunk]]) -> None:
        u = torch.from_numpy(uniforms(table.keys, table.index)).to(logits.device)
        tokens, logprobs = draw(logits, *table.cuts(logits.device, u))
        drawn = tokens.cpu().numpy()
        table.advance(drawn)
        self.tokens += len(drawn)
        flush = self._limits.flush
        for call, token, logprob in zip(self._active[low : low + len(drawn)], drawn.tolist(), logprobs.tolist(), strict=True):
            call.tokens.append(token)
            call.out.append(token)
            call.logprobs.append(logprob)
            call.versions.append(self.version)
            call.index += 1
            call.left -= 1
            if call.left and token not in call.stop and len(call.out) >= flush:
                ready.append((call.request.request_id, _chunk(call, None)))

    def _finished(self, ready: list[tuple[str, TokenChunk]]) -> list[int]:
        done = [row for row, call in enumerate(self._active) if not call.left or call.tokens[-1] in call.stop]
        for row in done:
            call = self._active[row]
            # the last token was drawn, not computed: its KV does not exist
            self._prefixes.put(call.tokens[:-1], self._cache.save(row, len(call.tokens) - 1))
            ready.append((call.request.request_id, _chunk(call, "stop" if call.tokens[-1] in call.stop else "length")))
        return done

    def _leave(self, rows: list[int]) -> None:
        """Free slots; the last rows move into the holes."""
        for row in sorted(rows, reverse=True):
            last = self._active.pop()
            if row < len(self._active):
                self._cache.move(len(self._active), row, len(last.tokens) - 1)
                self._active[row] = last
            self._table = None


class _Table:
    """What drawing needs of a group of calls, as arrays in their order; kept while the group does not change."""

    def __init__(self, calls: list[_Call]) -> None:
        self.keys = np.array([c.key for c in calls], dtype=np.uint64)
        self.index = np.array([c.index for c in calls], dtype=np.int64)
        self.last = np.array([c.tokens[-1] for c in calls], dtype=np.int64)
        self.position = np.array([len(c.tokens) - 1 for c in calls], dtype=np.int64)
        samplings = [c.request.sampling for c in calls]
        self._temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float32)
        self._top_p = torch.tensor([s.top_p for s in samplings]) if any(s.top_p < 1 for s in samplings) else None
        self._top_k = torch.tensor([s.top_k for s in samplings]) if any(s.top_k for s in samplings) else None

    def cuts(self, device: torch.device, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The arguments of `draw` after the logits."""
        top_p = self._top_p.to(device) if self._top_p is not None else None
        top_k = self._top_k.to(device) if self._top_k is not None else None
        return self._temperature.to(device), u, top_p, top_k

    def advance(self, drawn: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        self.last = drawn
        self.index += 1
        self.position += 1


def _chunk(call: _Call, finish: str | None) -> TokenChunk:
    columns = np.array(call.out, np.int32), np.array(call.logprobs, np.float32), np.array(call.versions, np.int32)
    chunk = TokenChunk(*columns, finish)
    call.out, call.logprobs, call.versions = [], [], []
    return chunk
