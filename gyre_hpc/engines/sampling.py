"""Drawing tokens by counter: generated token i of a call is the inverse CDF at u = hash(seed, i).

Why: a call that continues on another engine with prompt + generated tokens and `position` draws exactly what it would have drawn here,
because no generator state exists that would have to travel. Equal distributions give equal tokens; engines whose log-probs differ by
rounding (1e-6) differ in a draw with about that probability per token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_key(seed: int) -> int:
    """A call's seed, any integer, as the 64-bit key of its stream."""
    return int(_mix(np.array([seed & _MASK], dtype=np.uint64))[0])


def uniforms(keys: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (`seed_key`, index of the generated token); 52 bits, so 1 is never reached by rounding."""
    bits = _mix(keys + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    u: torch.Tensor,
    top_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs (nats), int64 and float32 [rows].

    `logits` [rows, vocabulary] of any float type; `temperature` float32 [rows], 0 = greedy (log-prob then at temperature 1); `u` float64
    [rows]. The log-prob is that of the whole distribution at this temperature; `top_p` [rows] (1 = off) and `top_k` [rows] (0 = off)
    only cut what can be drawn. Pass None for a cut that no row asks for.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, torch.ones_like(temperature), temperature)
    logp = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    probs = logp.exp()
    if top_p is not None or top_k is not None:
        probs = _cut(probs, top_p, top_k)
    cdf = probs.double().cumsum(-1)
    at = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    token = torch.where(greedy, logits.argmax(-1), at)
    return token, logp.gather(1, token[:, None])[:, 0]


def _cut(probs: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None) -> torch.Tensor:
    """Zero what is outside the top-k most probable tokens and outside the smallest set of mass >= top_p."""
    ordered, where = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(probs.shape[-1], device=probs.device)
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        before = ordered.cumsum(-1) - ordered
        keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(1, where, ordered * keep)
