"""Measures over next-token distributions: against sums written out, and at known points."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from emo.eval.generation import distributions as d
from emo.eval.generation.likelihood import cross_entropies


def naive(p: list[float], q: list[float]) -> dict[str, float]:
    """The definitions, element by element, in Python's own floats."""

    def kl(p: list[float], q: list[float]) -> float:
        return sum(a * math.log(a / b) if b else math.inf for a, b in zip(p, q, strict=True) if a)

    def entropy(p: list[float]) -> float:
        return -sum(a * math.log(a) for a in p if a)

    pairs, middle = list(zip(p, q, strict=True)), [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return {
        "kl_pq": kl(p, q), "kl_qp": kl(q, p), "js": (kl(p, middle) + kl(q, middle)) / 2,
        "tv": sum(abs(a - b) for a, b in pairs) / 2, "tail_mass": sum(b for a, b in pairs if a < d.RARE),
        "entropy_p": entropy(p), "entropy_q": entropy(q),
        "forward_ce": kl(p, q) + entropy(p), "reverse_ce": kl(q, p) + entropy(q),
    }  # fmt: skip


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0, math.inf])
def test_measures_equal_the_definitions(spread: float) -> None:
    """Also where each has tokens of probability zero that the other has not."""
    generator = torch.Generator().manual_seed(0)
    p, q = (d.log_probs(min(spread, 3) * torch.randn(4, 700, generator=generator)) for _ in range(2))
    if spread == math.inf:
        p, q = (torch.tensor([x], dtype=torch.float64).log() for x in ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5)))
    for row, (a, b) in enumerate(zip(p.exp().tolist(), q.exp().tolist(), strict=True)):
        for name, value in naive(a, b).items():
            assert float(d.measures(p, q)[name][row]) == pytest.approx(value, abs=1e-9), name
    assert torch.allclose(d.entropy(p), torch.from_numpy(stats.entropy(p.exp().numpy(), axis=-1)))


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_fast_cross_entropies_are_exact_to_1e_6(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (spread * torch.randn(16, 32000, generator=generator) + 30 for _ in range(2))
    exact = d.measures(d.log_probs(p), d.log_probs(q))
    for name, values in cross_entropies(p.clone(), q.clone()).items():
        assert (values - exact[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_temperature_of_an_entropy_is_found(temperature: float) -> None:
    logits = 3 * torch.randn(40, 60, generator=torch.Generator().manual_seed(3))
    target = float(d.entropy(d.log_probs(logits, temperature)).mean())
    assert d.matching_temperature(logits, target) == pytest.approx(temperature, rel=1e-9)
    with pytest.raises(ValueError):
        d.matching_temperature(logits, math.log(61))
