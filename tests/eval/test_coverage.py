"""Every 95 % interval of texts and judges holds the truth about as often as it says, on made-up data.

Where few values decide, the level of a discrete interval moves with the truth: a wider band counts for one of
them, and their mean is held to 0.92 to 0.98, or, below 30 units, may be too cautious.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from emo.eval import stats
from emo.eval.generation import quality
from emo.eval.generation.likelihood import Likelihood
from emo.eval.judging.results import paired

DRAWS = 300
VERDICTS = ((0.5, 0.0), (0.3, 0.2), (0.1, 0.1), (0.85, 0.1), (0.02, 0.9), (0.2, 0.6))  # wins, ties


@pytest.mark.parametrize(("questions", "each", "alike"), [(10, 1, 0), (50, 1, 0), (20, 3, 0.7)])
def test_win_rates(questions: int, each: int, alike: float) -> None:
    """Pairs of one question may agree."""
    labels, covered = [str(i) for i in range(questions) for _ in range(each)], []
    for seed, (win, tie) in enumerate(VERDICTS):
        rng, hits, chances = np.random.default_rng(seed), 0, [1 - win - tie, tie, win]
        for _ in range(DRAWS):
            alone = rng.choice([0.0, 0.5, 1.0], len(labels), p=chances)
            shared = np.repeat(rng.choice([0.0, 0.5, 1.0], questions, p=chances), each)
            scores = np.where(rng.random(len(labels)) < alike, shared, alone)
            _, interval = stats.bounded_mean(scores.tolist(), labels)
            hits += interval.low - 1e-9 <= win + tie / 2 <= interval.high + 1e-9
        covered.append(hits / DRAWS)
    assert min(covered) >= 0.88 and 0.92 <= np.mean(covered) <= (0.98 if questions >= 30 else 0.995), covered


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_a_clean_sweep_is_not_certain(score: float) -> None:
    """20 wins of 20 leave room; so do 20 ties, and 20 verdicts that are equal for both models."""
    labels = [str(i) for i in range(20)]
    value, interval = stats.bounded_mean([score] * 20, labels)
    assert value == score and interval.high - interval.low > 0.05 and interval.low < 0.9
    difference, interval, p = paired([score] * 20, [score] * 20, labels)
    assert interval.low < -0.05 and interval.high > 0.05 and (difference, p) == (0, 1)


@pytest.mark.parametrize("prefixes", [10, 100])
def test_measures_of_texts_and_perplexities(prefixes: int) -> None:
    """Texts after one prefix resemble each other; so do two models' texts after the same prefix."""
    clusters = [i for i in range(prefixes) for _ in range(3)]
    draws: dict[str, list[bool]] = {"one": [], "difference": [], "perplexity": []}
    widths = []
    rng = np.random.default_rng(0)
    for _ in range(2 * DRAWS):
        hardness = np.repeat(rng.normal(0, 0.5, prefixes), 3)
        estimates = []
        for shift in (0.0, 0.1):
            tokens = rng.integers(5, 40, len(clusters))
            nll = tokens * (3 + shift + hardness + rng.normal(0, 0.3, len(clusters)))
            estimates.append(Likelihood(nll, tokens).estimate(clusters))
        first, difference = estimates[0].interval(), (estimates[1] - estimates[0]).interval()
        assert first is not None and difference is not None
        perplexity = quality.shown(estimates[0], "prefixes", math.exp)
        draws["one"].append(first.low <= 3 <= first.high)
        draws["perplexity"].append(perplexity["low"] <= math.exp(3) <= perplexity["high"])
        draws["difference"].append(difference.low <= 0.1 <= difference.high)
        widths.append((first.high - first.low) / (difference.high - difference.low))
    for name, hits in draws.items():
        assert 0.92 <= np.mean(hits) <= 0.98, name
    assert np.mean(widths) > 1.5  # what pairing is for
    assert stats.ratio([3.0], None, [0]).interval() is None, "one text says nothing"
