"""A Hugging Face causal LM made ready for slot-wise batching, and proof that it is computed rightly.

Why the proof: an architecture may do something with its cache or attention that slots do not carry (states that are not per position,
attention terms that our kernel does not know). So every load compares a few tokens through slots with the model's own plain forward
pass: first with our grouped-query kernel, then with the model's own attention; a model that agrees with neither is refused, never served
wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from gyre_hpc.engines.slots import SlotCache, Target

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()

_KERNEL = "gyre_slots"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
_CHECK_TOKENS = 24


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention that never repeats KV heads: in decoding, the query heads of one KV head become its queries (4x faster at batch 128)."""
    rows, heads, tokens, size = query.shape
    groups = key.shape[1]
    if tokens == 1 and groups != heads:
        grouped = query.view(rows, groups, heads // groups, size)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(rows, 1, heads, value.shape[-1]), None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=groups != heads
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_KERNEL, _attention)


class UnsupportedModel(Exception):
    """This engine would compute the model wrongly."""


Loader = Callable[[Path, torch.dtype], Any]
"""Makes a transformers model of a directory. Raises OSError or ValueError."""


def from_files(path: Path, dtype: torch.dtype) -> Any:
    """All of it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)


def from_memory(kind: type[Any], weights: Mapping[str, torch.Tensor]) -> Loader:
    """Of class `kind`, with these weights under the names that they have in files, in place of those in the directory."""

    def load(path: Path, dtype: torch.dtype) -> Any:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model, told = kind.from_pretrained(None, config=config, dtype=dtype, state_dict=dict(weights), output_loading_info=True)
        # what is missing, or too much, transformers makes up or drops with a warning only
        if wrong := {name: found for name, found in told.items() if found}:
            raise ValueError(f"weights that are not those of {path}: {wrong}")
        return model

    return load


@dataclass(frozen=True)
class Piece:
    """Input of one forward pass: rows [low, low + len(tokens)) get their next tokens; `starts` are the positions of the first of each."""

    low: int
    tokens: list[list[int]]
    starts: list[int]


class SlotModel:
    """The weights, and forward passes over slots. Not thread-safe."""

    def __init__(self, path: Path, dtype: str, window: int, device: torch.device, load: Loader = from_files) -> None:
        """Loads and checks. Raises OSError or ValueError (not a model), UnsupportedModel."""
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        model = load(path, self.dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        config = self.model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self._layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
        sliding = getattr(config, "sliding_window", None)
        if not self._layer_types and getattr(config, "use_sliding_window", True) and sliding:
            self._layer_types = ["sliding_attention"]
        self._sliding = int(sliding) if sliding else 0
        strange = set(self._layer_types) - {"full_attention", "sliding_attention"}
        if strange:
            raise UnsupportedModel(f"{path}: layers of type {', '.join(sorted(strange))}")
        self._check(path)

    def forward(self, cache: SlotCache, piece: Piece) -> torch.Tensor:
        """Run a piece, store its KV, return the logits after each row's last token [rows, vocabulary]."""
        counts = [len(t) for t in piece.tokens]
        wide = max(counts)
        if wide == 1:
            return self.decode(cache, piece.low, np.array([t[0] for t in piece.tokens]), np.array(piece.starts))
        rows = len(counts)
        # rows end together on the right, so that the last column's logits are the ones wanted; what pads the left is never stored
        ids = np.zeros((rows, wide), dtype=np.int64)
        positions = np.zeros((rows, wide), dtype=np.int64)
        real = np.zeros((rows, wide), dtype=bool)
        for r, (tokens, start, n) in enumerate(zip(piece.tokens, piece.starts, counts, strict=True)):
            ids[r, wide - n :] = tokens
            positions[r, wide - n :] = np.arange(start, start + n)
            real[r, wide - n :] = True
        row_of = np.broadcast_to(np.arange(piece.low, piece.low + rows)[:, None], real.shape)
        source = np.flatnonzero(real.ravel())
        target = Target(
            low=piece.low,
            high=piece.low + rows,
            width=int(positions.max()) + 1,
            rows=self._tensor(row_of.ravel()[source]),
            columns=self._tensor(positions.ravel()[source]),
            source=None if len(source) == real.size else self._tensor(source),
        )
        return self._run(cache, target, self._tensor(ids), self._tensor(positions))

    def decode(self, cache: SlotCache, low: int, last: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> torch.Tensor:
        """One token for each of the rows [low, low + n): `last` its id and `positions` its position, int64 [n]."""
        where = self._tensor(positions)
        rows = torch.arange(low, low + len(last), device=self.device)
        target = Target(low, low + len(last), int(positions.max()) + 1, rows, where, None)
        return self._run(cache, target, self._tensor(last)[:, None], where[:, None])

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Nats of tokens[1:], each after those before it: all prefixes in one pass over slots of their own, as prompts are computed."""
        prefixes = [tokens[:end] for end in range(1, len(tokens))]
        logits = self.forward(SlotCache(len(tokens), self.device), Piece(0, prefixes, [0] * len(prefixes)))
        picked = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:], device=self.device)[:, None])
        return [float(value) for value in picked[:, 0]]

    def _run(self, cache: SlotCache, target: Target, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache.reserve(target.high, target.width)
        cache.target = target
        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks(positions, target.width),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _masks(self, positions: torch.Tensor, width: int) -> Any:
        """Additive masks [rows, 1, tokens, width], by layer type where the model has several."""
        columns = torch.arange(width, device=self.device)
        ago = positions[:, None, :, None] - columns
        low = torch.finfo(self.dtype).min
        full = torch.zeros(ago.shape, dtype=self.dtype, device=self.device).masked_fill_(ago < 0, low)
        if "sliding_attention" not in self._layer_types:
            return full
        sliding = full.masked_fill(ago >= self._sliding, low)
        if len(self._layer_types) == 1:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _check(self, path: Path) -> None:
        """Choose the fast kernel if it agrees with the plain forward pass, else the model's own attention, else refuse."""
        count = _CHECK_TOKENS if not 0 < self._sliding <= 256 else self._sliding + _CHECK_TOKENS
        ids = np.random.default_rng(0).integers(0, self.vocabulary, count)
        with torch.no_grad():
            plain = self.model(input_ids=self._tensor(ids)[None], use_cache=False).logits[0].float().log_softmax(-1)
        own = self.model.config._attn_implementation
        worst: dict[str, float] = {}
        for kernel in (_KERNEL, own):
            try:
                self.model.set_attn_implementation(kernel)
                worst[kernel] = self._deviation(ids.tolist(), plain)
            except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
                log.info("%s: attention %s does not run over slots: %s", path, kernel, error)
                continue
            if worst[kernel] <= _TOLERANCE[self.dtype]:
                log.info("%s: attention %s, largest log-prob difference to a plain forward pass %.1e", path, kernel, worst[kernel])
                return
        raise UnsupportedModel(f"{path}: log-probs over slots differ from a plain forward pass by {worst or 'an error'}")

    def _deviation(self, ids: list[int], plain: torch.Tensor) -> float:
        """Largest log-prob difference over two ragged rows, prefilled and then decoded together."""
        cache = SlotCache(len(ids), self.device)
        short, long = len(ids) // 3, 2 * len(ids) // 3
        logits = self.forward(cache, Piece(0, [ids[:short], ids[:long]], [0, 0]))
        worst = (logits.float().log_softmax(-1) - plain[[short - 1, long - 1]]).abs().max()
        for step in range(len(ids) - long):
            at = np.array([short + step, long + step])
            logits = self.decode(cache, 0, np.array([ids[p] for p in at]), at)
            worst = torch.maximum(worst, (logits.float().log_softmax(-1) - plain[at]).abs().max())
        value = float(worst)
        return value if value == value else float("inf")
