"""The canary: log-probs of one fixed short text under a version's weights, as the trainer computes them, to compare an engine's own with.

Why: an engine that says the right version may have half of the weights, or have put them into the wrong places; nothing else would say
so, for what it samples is fluent and its log-probs are finite. Invariants: the text depends on the vocabulary's size and on
the window alone; whoever publishes weights writes their canary before anybody is told of them; no engine gets calls under a version whose
canary it does not repeat within a tolerance. The text is random ids: on such text weights that differ at all differ clearly, and
no tokenizer is needed.

What it can't see: differences below what two programs' kernels round differently, as a bfloat16 step with a tiny learning rate may be.
How much that is depends on the model: where a mixture's router is undecided one rounding sends a token to other experts, and random text
finds such places. So the trainer says along with the log-probs how far its own move when its input moves by one rounding (`rounding`), and
an engine may be off by a few times as much. Two attention kernels of one program, in bfloat16, on models of 24 layers with random weights,
were apart by 0.4 to 0.9 of it, dense or mixture, from 0.004 to 1.6 nats. Where it is large only gross mistakes show; the log tells both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gyre_hpc.durable import beside
from gyre_hpc.errors import GyreError

NAME = "canary.json"
LENGTH = 24
TOLERANCES = {"float32": 0.001, "bfloat16": 0.2, "float16": 0.05}
"""Nats, by `model.dtype`: what kernels that compute the same weights may differ by in the mean, several times over."""
_ROUNDINGS = 3.0
"""As many times `Canary.rounding` are allowed where that is more."""


@dataclass(frozen=True)
class Canary:
    """`logprobs[i]`: nats of `tokens[i + 1]` after those before it, at temperature 1, under `version`.

    `rounding`: nats by which the trainer's own move in the mean when its input moves by one rounding of its dtype.
    """

    version: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rounding: float = 0.0

    def difference(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference in nats; infinite where something is missing or not finite."""
        if len(logprobs) != len(self.logprobs):
            return math.inf
        found = float(np.mean(np.abs(np.subtract(logprobs, self.logprobs, dtype=np.float64))))
        return found if math.isfinite(found) else math.inf

    def moved(self, logprobs: Sequence[float]) -> Canary:
        """With `rounding` from the trainer's log-probs after its input has moved; 0 where these are not finite: nothing is known then."""
        found = self.difference(logprobs)
        return replace(self, rounding=found if math.isfinite(found) else 0.0)

    def allowed(self, least: float) -> float:
        """Nats by which an engine may be off in the mean: `least`, or more where this model answers to roundings by more."""
        return max(least, _ROUNDINGS * self.rounding)

    def write(self, path: Path) -> None:
        """Whole or absent. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = beside(path, f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        os.replace(partial, path)


def text(vocabulary: int, window: int) -> tuple[int, ...]:
    """The ids to score: at least 2, at most LENGTH, and one less than the window holds."""
    count = max(2, min(LENGTH, window - 1))
    return tuple(int(token) for token in np.random.default_rng(0).integers(0, vocabulary, count))


def read(path: Path) -> Canary:
    """Raises OSError where it is not there, GyreError where it is not one."""
    try:
        data = json.loads(path.read_text())
        tokens, logprobs = tuple(map(int, data["tokens"])), tuple(map(float, data["logprobs"]))
        return Canary(int(data["version"]), tokens, logprobs, float(data.get("rounding", 0.0)))
    except (ValueError, KeyError, TypeError) as error:
        raise GyreError(f"canary {path} can't be read: {error}", "remove that folder of weights; the same command resumes") from error


def short(logprobs: Sequence[float]) -> str:
    """The first few values, for a line."""
    shown = ", ".join(f"{value:.3f}" for value in logprobs[:4])
    return f"[{shown}{', ...' if len(logprobs) > 4 else ''}]"
