"""Measures over next-token distributions: against sums written out, and at known points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from emo.eval.generation import distributions as d
from emo.eval.generation.likelihood import cross_entropies


def naive(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
    """The definitions, element by element, in Python's own floats."""
    pairs = list(zip(p.tolist(), q.tolist(), strict=True))
    middle = [(a + b) / 2 for a, b in pairs]
    return {
        "kl_pq": sum(a * math.log(a / b) for a, b in pairs if a),
        "kl_qp": sum(b * math.log(b / a) for a, b in pairs if b),
        "js": sum(
            (a * math.log(a / m) if a else 0) / 2 + (b * math.log(b / m) if b else 0) / 2
            for (a, b), m in zip(pairs, middle, strict=True)
        ),
        "tv": sum(abs(a - b) for a, b in pairs) / 2,
        "tail_mass": sum(b for a, b in pairs if a < d.RARE),
        "entropy_p": -sum(a * math.log(a) for a, _ in pairs if a),
        "entropy_q": -sum(b * math.log(b) for _, b in pairs if b),
        "forward_ce": -sum(a * math.log(b) for a, b in pairs if a),
        "reverse_ce": -sum(b * math.log(a) for a, b in pairs if b),
    }


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
def test_measures_equal_the_definitions(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = (spread * torch.randn(4, 700, generator=generator) for _ in range(2))
    actual = d.measures(d.log_probs(p_logits), d.log_probs(q_logits))
    for row in range(4):
        p, q = (np.exp(x[row].double().log_softmax(0).numpy()) for x in (p_logits, q_logits))
        for name, value in naive(p, q).items():
            assert float(actual[name][row]) == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_fast_cross_entropies_are_exact_to_1e_6(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (spread * torch.randn(16, 32000, generator=generator) + 30 for _ in range(2))
    exact = d.measures(d.log_probs(p), d.log_probs(q))
    for name, values in cross_entropies(p.clone(), q.clone()).items():
        assert (values - exact[name]).abs().max() < 1e-6, name


def test_zero_probabilities() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    q = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64).log()
    assert d.kl(p, q) == math.inf and d.cross_entropy(p, q) == math.inf
    assert float(d.jensen_shannon(p, q)) == pytest.approx(math.log(2) / 2)
    assert float(d.total_variation(p, q)) == pytest.approx(0.5)
    assert float(d.tail_mass(p, q)) == pytest.approx(0.5)
    assert float(d.entropy(p)) == pytest.approx(math.log(2))


def test_identities() -> None:
    p, q = (d.log_probs(torch.randn(5, 50, generator=torch.Generator().manual_seed(s))) for s in (1, 2))
    assert torch.allclose(d.cross_entropy(p, q), d.entropy(p) + d.kl(p, q))
    assert d.kl(p, p).abs().max() < 1e-12 and d.jensen_shannon(p, p).abs().max() < 1e-12
    assert torch.allclose(d.jensen_shannon(p, q), d.jensen_shannon(q, p))
    assert torch.allclose(d.entropy(p), torch.from_numpy(stats.entropy(p.exp().numpy(), axis=-1)))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_temperature_of_an_entropy_is_found(temperature: float) -> None:
    logits = 3 * torch.randn(40, 60, generator=torch.Generator().manual_seed(3))
    target = float(d.entropy(d.log_probs(logits, temperature)).mean())
    assert d.matching_temperature(logits, target) == pytest.approx(temperature, rel=1e-9)


def test_an_entropy_that_no_temperature_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="no temperature"):
        d.matching_temperature(torch.zeros(2, 8), math.log(9))
