"""Training rows: what a selected path of an execution's tree becomes, and how rows are stacked into batches.

Invariants: a target is predicted exactly once (index 0 never is: nothing stands before it); the weights of one execution's rows sum
to 1 over its targets, so that a sum over rows is a sum over executions; stacking changes neither values nor their number, so any cut of
the same rows gives the same gradient. Padding stands on the right: under causal attention no token ever sees it, so no mask is needed
and positions count from 0 as in the engine. Ordering key of a batch: longest first, then the caller's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_hpc.branches import counted_all
from trees.selection import Path


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One root-to-leaf path to train on.

    `tokens` int32[T]; `targets` bool[T]: predict this token from those before it; `logprobs` float32[T], nats, of the behaviour policy
    (read at targets only); `versions` int32[T] of the weights that sampled, as they count (read at targets only); `weight` of each target,
    1 / (targets of its execution over all its rows); `advantage` of its execution. Raises ValueError for anything that can't be trained.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    weight: float
    advantage: float

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("targets", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"row of {length} tokens has {len(getattr(self, name))} {name}")
        if length < 2 or not self.targets.any():
            raise ValueError(f"row of {length} tokens has {int(self.targets.sum())} targets")
        if self.targets[0]:
            raise ValueError("the first token of a row can't be a target")
        if not np.isfinite(self.logprobs[self.targets]).all():
            raise ValueError("a target's behaviour log-prob is not finite")
        if not (np.isfinite(self.advantage) and 0.0 < self.weight <= 1.0):
            raise ValueError(f"row with weight {self.weight} and advantage {self.advantage}")

    @classmethod
    def of(cls, path: Path, advantage: float, branch: int | None = None) -> TrainRow:
        """The row of a selected path; `branch`: versions after it are of weights that a resume gave up (gyre_hpc/branches.py)."""
        return cls(
            tokens=np.asarray(path.tokens, np.int32),
            targets=np.asarray(path.targets, np.bool_),
            logprobs=np.asarray(path.logprobs, np.float32),
            versions=counted_all(np.asarray(path.versions, np.int32), branch),
            weight=float(path.weight),
            advantage=float(advantage),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """R rows padded to length L, and their N targets flat in row order.

    `ids` int64[R, L]; per target: `row`, `position` (>= 1) int64[N], `behaviour` float32[N], `version` int64[N];
    per row: `weight`, `advantage` float32[R].
    """

    ids: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    behaviour: NDArray[np.float32]
    version: NDArray[np.int64]
    weight: NDArray[np.float32]
    advantage: NDArray[np.float32]
    tokens: int
    """Tokens without padding."""


def share(tokens: int, ranks: int) -> int:
    """The budget of one rank's batches where a micro-step of `tokens` is dealt out to `ranks`: twice its equal share, for rows are dealt
    whole; the padding of a long row beside many short ones would make it that of the whole cell."""
    return min(tokens, -(-2 * tokens // ranks))


def stack(rows: Sequence[TrainRow], budget: int, pad: int = 0) -> list[Batch]:
    """Cut rows into batches of at most `budget` tokens, padding included (a longer row is a batch of its own).

    The values at `pad` never matter; it must only be a valid id.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        longest = len(rows[order[start]].tokens)
        count = max(1, budget // longest)
        batches.append(_pad([rows[i] for i in order[start : start + count]], pad))
        start += count
    return batches


def _pad(rows: Sequence[TrainRow], pad: int) -> Batch:
    length = max(len(row.tokens) for row in rows)
    ids = np.full((len(rows), length), pad, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = row.tokens
    positions = [np.flatnonzero(row.targets) for row in rows]
    return Batch(
        ids=ids,
        row=np.repeat(np.arange(len(rows)), [len(p) for p in positions]),
        position=np.concatenate(positions).astype(np.int64),
        behaviour=np.concatenate([row.logprobs[row.targets] for row in rows]).astype(np.float32),
        version=np.concatenate([row.versions[row.targets] for row in rows]).astype(np.int64),
        weight=np.array([row.weight for row in rows], np.float32),
        advantage=np.array([row.advantage for row in rows], np.float32),
        tokens=sum(len(row.tokens) for row in rows),
    )
