"""The objective against a naive reference: one unpadded path at a time, float64, written from the formula with Python's own loops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre_hpc.training.loss import Objective, Sums, batch_loss, objective
from gyre_hpc.training.rows import TrainRow, stack
from tests.training.conftest import make_rows

RULE = Objective(temperature=0.7, token_cap=1.6, clip_low=0.9, clip_high=1.2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()


def on_policy(model: Any, rows: list[TrainRow], shift: float = 0.0, noise: float = 0.25) -> list[TrainRow]:
    """Behaviour log-probs = the model's own, moved by a shift per row and noise per token: ratios on both sides of cap and clip."""
    rng = np.random.default_rng(5)
    out = []
    for row in rows:
        own = np.full(len(row.tokens), np.nan)
        with torch.no_grad():
            for t in np.flatnonzero(row.targets):
                own[t] = float(row_logprob(model, row, int(t)))
        moved = own + rng.normal(0, shift) + rng.normal(0, noise, len(own)) if noise else own + shift
        out.append(dataclasses.replace(row, logprobs=moved.astype(np.float32)))
    return out


def row_logprob(model: Any, row: TrainRow, t: int) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(row.tokens[:t].astype(np.int64))[None]).logits[0, -1] / RULE.temperature
    out: torch.Tensor = logits[int(row.tokens[t])] - torch.logsumexp(logits, 0)
    return out


def reference(model: Any, row: TrainRow) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, a scalar whose gradient is the loss's, sums), by the formula of gyre_hpc/training/loss.py."""
    targets = [int(t) for t in np.flatnonzero(row.targets)]
    logp = [row_logprob(model, row, t) for t in targets]
    ratios = [math.exp(float(lp.detach()) - float(row.logprobs[t])) for lp, t in zip(logp, targets, strict=True)]
    sequence = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    a = row.advantage
    bounded = min(max(sequence, RULE.clip_low), RULE.clip_high)
    value = min(sequence * a, bounded * a)
    moves = value == sequence * a
    weights = [row.weight * min(r, RULE.token_cap) for r in ratios]
    loss = -sum(w * value for w in weights)
    carrier = -sum((w * sequence * a * lp for w, lp in zip(weights, logp, strict=True)), torch.zeros(())) * float(moves)
    sums = {
        "clipped": 0 if moves else len(targets),
        "capped": sum(r > RULE.token_cap for r in ratios),
        "ratio": sequence,
        "targets": len(targets),
        "kl": sum(r - 1 - math.log(r) for r in ratios),
    }
    return loss, carrier, sums


def assert_close(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> None:
    """Equal to float32 rounding, by the largest entry (ratios and log-probs are float32 in the objective)."""
    scale = max(float(e.abs().max()) for e in expected)
    assert max(float((e - g).abs().max()) for e, g in zip(expected, got, strict=True)) < 2e-6 * scale


def test_loss_and_gradient_equal_the_naive_reference(model: Any) -> None:
    rows = on_policy(model, make_rows(6, 1), shift=0.2)
    parameters = list(model.parameters())
    losses, carriers, sums = zip(*(reference(model, row) for row in rows), strict=True)
    expected = torch.autograd.grad(torch.stack(carriers).sum(), parameters)
    total, got = Sums(), [torch.zeros_like(p) for p in parameters]
    for batch in stack(rows, 100):
        loss, part = batch_loss(model, batch, RULE, CPU)
        total += part
        for sum_, gradient in zip(got, torch.autograd.grad(loss, parameters), strict=True):
            sum_ += gradient
    assert total.loss == pytest.approx(sum(losses), rel=1e-5)
    for name in sums[0]:
        assert getattr(total, name) == pytest.approx(sum(s[name] for s in sums), rel=1e-4), name
    assert 0 < total.clipped < total.targets
    assert 0 < total.capped < total.targets
    assert_close(expected, got)


def test_on_policy_it_is_the_plain_policy_gradient(model: Any) -> None:
    rows = on_policy(model, make_rows(3, 2), noise=0.0)
    parameters = list(model.parameters())
    plain = torch.stack(
        [-row.weight * row.advantage * row_logprob(model, row, int(t)) for row in rows for t in np.flatnonzero(row.targets)]
    ).sum()
    expected = torch.autograd.grad(plain, parameters)
    (batch,) = stack(rows, 10_000)
    loss, sums = batch_loss(model, batch, RULE, CPU)
    assert_close(expected, torch.autograd.grad(loss, parameters))
    assert sums.log_ratio < 1e-4
    assert (sums.clipped, sums.capped) == (0, 0)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "value", "moves"),
    [
        (2.0, math.log(1.1), 1.1 * 2.0 * 1.1, True),
        (2.0, math.log(1.5), 1.2 * 2.0 * 1.5, False),  # up, and already far up: silent
        (2.0, math.log(0.5), 0.5 * 2.0 * 0.5, True),  # up, but it fell: pulled back
        (-2.0, math.log(0.5), 0.9 * -2.0 * 0.5, False),
        (-2.0, math.log(1.5), 1.5 * -2.0 * 1.5, True),
        (-2.0, math.log(4.0), 4.0 * -2.0 * 1.6, True),  # the token weight is capped, the sequence ratio is not
        (0.0, 0.0, 0.0, True),
    ],
)
def test_clip_and_cap_by_hand(advantage: float, log_ratio: float, value: float, moves: bool) -> None:
    logprobs = torch.full((4,), -2.0 + log_ratio, requires_grad=True)
    zero = torch.zeros(4, dtype=torch.int64)
    loss, sums = objective(logprobs, torch.full((4,), -2.0), zero, torch.tensor([0.25]), torch.tensor([advantage]), RULE)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(-value, rel=1e-5)
    assert bool(sums["clipped"] > 0) is not moves
    assert gradient.tolist() == pytest.approx([-value / 4 if moves else 0.0] * 4, rel=1e-5)


def test_padding_is_never_seen(model: Any) -> None:
    rows = make_rows(4, 6)
    (first,), (second,) = stack(rows, 10_000, pad=0), stack(rows, 10_000, pad=17)
    assert np.array_equal(batch_loss(model, first, RULE, CPU)[1].array(), batch_loss(model, second, RULE, CPU)[1].array())


def test_temperature_zero_means_log_probs_of_temperature_one(model: Any) -> None:
    (batch,) = stack(make_rows(2, 7), 10_000)
    greedy, one = (batch_loss(model, batch, dataclasses.replace(RULE, temperature=t), CPU)[1] for t in (0.0, 1.0))
    assert greedy == one


def test_sums_travel_as_an_array_and_name_their_means() -> None:
    sums = Sums(loss=-3.0, rows=2, tokens=50, targets=10, clipped=5, capped=1, ratio=2.2, entropy=20, kl=1, log_ratio=0.5, version=15)
    assert Sums.of(sums.array() + sums.array()) == sums + sums
    assert len(sums.array()) == Sums.size()
    means = sums.means(executions=3, version=2)
    assert means["loss"] == -1.0
    assert means["staleness_mean"] == 0.5
    assert means["clip_fraction"] == 0.5
    assert means["entropy"] == 2.0
    assert all(math.isfinite(value) for value in Sums().means(0, 3).values())
