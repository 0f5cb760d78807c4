"""Draws depend on (seed, index) alone, follow the distribution, and report log-probs before cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_hpc.engines.sampling import draw, seed_key, uniforms


def _u(seed: int, count: int) -> np.ndarray:
    return uniforms(np.full(count, seed_key(seed), dtype=np.uint64), np.arange(count))


def test_uniforms_are_uniform_and_streams_are_unrelated() -> None:
    a, b = _u(1, 20000), _u(2, 20000)
    assert 0 <= a.min() <= a.max() < 1
    assert np.abs(np.histogram(a, 20, (0, 1))[0] - 1000).max() < 150
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.03
    assert _u(-1, 3).tolist() == _u(2**64 - 1, 3).tolist() != _u(1, 3).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    count = 20000
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5])
    tokens, logp = draw(logits.expand(count, -1), torch.full((count,), temperature), torch.from_numpy(_u(5, count)))
    expected = (logits / temperature).softmax(-1)
    seen = torch.bincount(tokens, minlength=5) / count
    assert (seen - expected).abs().max() < 0.015
    assert seen[3] == 0
    torch.testing.assert_close(logp, expected.log()[tokens])


def test_greedy_takes_the_largest_with_its_log_prob_at_temperature_one() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    tokens, logp = draw(logits, torch.zeros(7), torch.from_numpy(_u(0, 7)))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logp, logits.log_softmax(-1).max(-1).values)


def test_cuts_limit_what_is_drawn_but_not_the_log_prob() -> None:
    count = 4000
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    probs = logits.softmax(-1)
    u, ones = torch.from_numpy(_u(9, count)), torch.ones(count)
    rows = logits.expand(count, -1)
    top_k = torch.full((count,), 2)
    top_k[0] = 0
    tokens, logp = draw(rows, ones, u, None, top_k)
    assert set(tokens[1:].tolist()) == {0, 1}
    torch.testing.assert_close(logp, probs.log()[tokens])
    # mass of the first is 0.64: 0.7 needs the second as well, 0.5 does not
    assert set(draw(rows, ones, u, torch.full((count,), 0.7), None)[0].tolist()) == {0, 1}
    assert set(draw(rows, ones, u, torch.full((count,), 0.5), None)[0].tolist()) == {0}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    temperature, u = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.0, 1.0]), torch.from_numpy(_u(3, 6))
    together = draw(logits, temperature, u)[0].tolist()
    assert together == [int(draw(logits[i : i + 1], temperature[i : i + 1], u[i : i + 1])[0]) for i in range(6)]
