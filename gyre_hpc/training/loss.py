"""The objective: a GSPO variant as a sum over executions (qwengyre.md 3.5, 3.6).

For a row (one selected path) with targets t, trainer log-probs l_t, behaviour log-probs b_t, advantage A and weight w per target:

    r_t = exp(l_t - b_t)                      token ratio
    s   = exp(mean_t (l_t - b_t))             sequence ratio, the mean over this row's targets
    s_t = sg(s) * r_t / sg(r_t)               worth s, its gradient is that of l_t (GSPO-token); sg: no gradient
    J   = sum_t  w * sg(min(r_t, cap)) * min(s_t * A, clip(s_t, low, high) * A)          loss = -sum of J over rows

Choices that are ours, since what is known of the paper says only "token importance weight capped at 5, sequence-level clip range
[0.995, 1.005]":
- The sequence ratio gates and scales as in GSPO: a row that has moved past the clip range in the direction of its advantage gives no
  gradient at all. The "sequence" is the row: the unit that one process computes, so the value needs no other process.
- The token weight is a truncated importance weight, without gradient: it corrects each token for the policy (and the engine) that really
  sampled it, and the cap bounds what one token can do. Where all is on-policy both ratios are 1 and this is the plain policy gradient.
  Off-policy the product s * r_t corrects by s more than token-level importance sampling would; on the clipped side s stays within
  half a per cent of 1, which is why it is left so.

Invariants: nothing is normalised here by anything that depends on how rows are cut; `weight` carries the mean inside the execution and the
optimizer step divides once by the number of executions. All sums are additive over batches, micro-steps and cells.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_hpc.training.head import target_logprobs
from gyre_hpc.training.rows import Batch


@dataclass(frozen=True)
class Objective:
    """`temperature` that the behaviour policy sampled with (0, greedy: log-probs are those of temperature 1)."""

    temperature: float
    token_cap: float
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class Sums:
    """What one or many micro-steps add up to; `+` is exact up to rounding, order free. Ratios are per row, the rest per target."""

    loss: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    targets: float = 0.0
    clipped: float = 0.0
    """Targets in rows that the clip range silenced."""
    capped: float = 0.0
    """Targets whose importance weight was cut to the cap."""
    ratio: float = 0.0
    """Sequence ratios, summed over rows."""
    entropy: float = 0.0
    """Exact entropy of the trainer's distribution in nats, summed over targets."""
    kl: float = 0.0
    """Estimate r - 1 - log r of KL(behaviour || trainer), summed over targets."""
    log_ratio: float = 0.0
    """|l - b| summed over targets: on-policy it is the disagreement of engine and trainer."""
    version: float = 0.0
    """Weight versions that sampled the targets, summed."""
    seconds: float = 0.0
    """Of all ranks: from the rows' tokens to their gradients."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def array(self) -> NDArray[np.float64]:
        """float64[fields], in field order: to be summed over processes."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, array: NDArray[np.float64]) -> Sums:
        """Undo `array`."""
        return cls(*(float(x) for x in array))

    @classmethod
    def size(cls) -> int:
        return len(fields(cls))

    def means(self, executions: int, version: int) -> dict[str, float]:
        """Per-target, per-row and per-execution means; `staleness_mean` counts updates between sampling and weight `version`."""
        targets, rows = max(self.targets, 1.0), max(self.rows, 1.0)
        return {
            "loss": self.loss / max(executions, 1),
            "target_tokens": self.targets,
            "trained_tokens": self.tokens,
            "rows": self.rows,
            "clip_fraction": self.clipped / targets,
            "cap_fraction": self.capped / targets,
            "ratio_mean": self.ratio / rows,
            "entropy": self.entropy / targets,
            "kl": self.kl / targets,
            "logprob_difference": self.log_ratio / targets,
            "staleness_mean": version - self.version / targets if self.targets else 0.0,
            "train_seconds": self.seconds,
        }


def objective(
    logprobs: torch.Tensor, behaviour: torch.Tensor, row: torch.Tensor, weight: torch.Tensor, advantage: torch.Tensor, rule: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of R rows with N targets, and detached sums.

    `logprobs`, `behaviour` float32[N]; `row` int64[N], the row of each target; `weight`, `advantage` float32[R], every row with a target.
    """
    rows = len(weight)
    log_ratio = logprobs - behaviour
    stopped = log_ratio.detach()
    count = torch.zeros(rows, device=row.device).index_add_(0, row, torch.ones_like(stopped))
    sequence = torch.exp(torch.zeros_like(weight).index_add_(0, row, stopped) / count)
    token = torch.exp(stopped)
    importance = token.clamp(max=rule.token_cap)
    carried = sequence[row] * torch.exp(logprobs - logprobs.detach())
    gain = advantage[row]
    bounded = carried.clamp(rule.clip_low, rule.clip_high)
    loss = -(weight[row] * importance * torch.minimum(carried * gain, bounded * gain)).sum()
    silent = ((advantage > 0) & (sequence > rule.clip_high)) | ((advantage < 0) & (sequence < rule.clip_low))
    return loss, {
        "clipped": silent[row].sum(),
        "capped": (token > rule.token_cap).sum(),
        "ratio": sequence.sum(),
        "kl": (token - 1.0 - stopped).sum(),
        "log_ratio": stopped.abs().sum(),
    }


def batch_loss(model: Any, batch: Batch, rule: Objective, device: torch.device, chunk: int | None = None) -> tuple[torch.Tensor, Sums]:
    """The loss of one batch with its graph, and the sums. `chunk`: most targets that the head sees at once, see training/head.py."""
    ids, row, position, behaviour, weight, advantage = (
        torch.from_numpy(a).to(device) for a in (batch.ids, batch.row, batch.position, batch.behaviour, batch.weight, batch.advantage)
    )
    logprobs, entropy = target_logprobs(model, ids, row, position, rule.temperature, chunk)
    loss, parts = objective(logprobs, behaviour, row, weight, advantage, rule)
    return loss, Sums(
        loss=float(loss.detach()),
        rows=float(len(batch.weight)),
        tokens=float(batch.tokens),
        targets=float(len(batch.row)),
        entropy=float(entropy),
        version=float(batch.version.sum()),
        **{name: float(value) for name, value in parts.items()},
    )
