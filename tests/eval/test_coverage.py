"""Every 95 % interval of texts and judges holds the truth about as often as it says, on made-up data.

Where few values decide, the level of a discrete interval moves with the truth: for the tenth of the cases in
which it is furthest off, a wider band counts; their mean is held to 0.92 to 0.98 throughout, or, below
30 units, may be too cautious. `eval quality` says there how many units there were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from emo.eval import stats
from emo.eval.generation import quality
from emo.eval.generation.likelihood import Likelihood
from emo.eval.judging.pairs import Judged
from emo.eval.judging.results import paired, summary

DRAWS = 300
Generator = np.random.Generator
Draw = Callable[[Generator], tuple[stats.Interval, float]]


def coverage(draw: Draw, draws: int = DRAWS, seed: int = 0) -> float:
    """Return how often the interval of a draw holds the truth of that draw."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(draws):
        interval, truth = draw(rng)
        hits += interval.low - 1e-9 <= truth <= interval.high + 1e-9
    return hits / draws


def judged_scores(scores: Sequence[float]) -> Judged:
    """Pairs of one question each, with these scores for B."""
    outcomes = {0.0: "a", 0.5: "tie", 1.0: "b"}
    rows = [
        {"id": str(i), "question": str(i), "a": "x", "b": "y", "verdicts": [outcomes[score]], "cut": None,
         "outcome": outcomes[score], "score": score, "human": [], "replies": [], "unasked": None}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return Judged("auto-j", "me", "a", "b", 1, rows)


def check(draws: Sequence[Draw], units: int, least: float = 0.9) -> None:
    """Hold the mean coverage of several truths to the band, and each of them to `least`."""
    actual = [coverage(draw, seed=number) for number, draw in enumerate(draws)]
    assert min(actual) >= least, actual
    assert 0.92 <= np.mean(actual) <= (0.98 if units >= 30 else 0.995), actual


def names(count: int, each: int = 1) -> list[str]:
    return [str(i) for i in range(count) for _ in range(each)]


def two_models(
    rng: Generator, n: int, rates: tuple[float, float], alike: float
) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of two models on the same rows, which answer a share of them alike."""
    luck = rng.random((2, n))
    luck[1] = np.where(rng.random(n) < alike, luck[0], luck[1])
    return luck[0] < rates[0], luck[1] < rates[1]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_mean_over_seeds(n: int) -> None:
    def draw(rng: Generator) -> tuple[stats.Interval, float]:
        actual = quality.by_seed(list(range(n)), rng.normal(3, 1, n).tolist())
        return stats.Interval(actual["low"], actual["high"]), 3.0

    assert 0.92 <= coverage(draw, 2 * DRAWS) <= 0.98


# --- judges -----------------------------------------------------------------------------------------------

VERDICTS = ((0.5, 0.0), (0.3, 0.2), (0.1, 0.1), (0.85, 0.1), (0.02, 0.9), (0.2, 0.6))  # wins, ties


@pytest.mark.parametrize(("questions", "each", "alike"), [(10, 1, 0), (50, 1, 0), (20, 3, 0.7)])
def test_win_rates_and_shares(questions: int, each: int, alike: float) -> None:
    """Pairs of one question may agree; every figure that a judgement prints is asked."""
    labels = names(questions, each)

    def of(win: float, tie: float, key: str) -> Draw:
        truth = {"win": win, "tie": tie, "loss": 1 - win - tie, "win_rate": win + tie / 2}[key]

        def draw(rng: Generator) -> tuple[stats.Interval, float]:
            chances = [1 - win - tie, tie, win]
            alone = rng.choice([0.0, 0.5, 1.0], len(labels), p=chances)
            shared = np.repeat(rng.choice([0.0, 0.5, 1.0], questions, p=chances), each)
            scores = np.where(rng.random(len(labels)) < alike, shared, alone)
            actual = {"win": scores > 0.5, "tie": scores == 0.5, "loss": scores < 0.5, "win_rate": scores}[
                key
            ]
            return stats.bounded_mean(actual.astype(float).tolist(), labels)[1], truth

        return draw

    for key in ("win_rate", "win"):
        check(
            [of(win, tie, key) for win, tie in VERDICTS if win > 0.05 or key == "win_rate"], questions, 0.88
        )


@pytest.mark.parametrize(("questions", "each"), [(10, 1), (50, 1), (30, 3)])
def test_differences_of_win_rates(questions: int, each: int) -> None:
    labels = names(questions, each)

    def of(first: float, second: float, ties: float) -> Draw:
        def draw(rng: Generator) -> tuple[stats.Interval, float]:
            wins = two_models(rng, len(labels), (first, second), 0.5)
            tied = rng.random((2, len(labels))) < ties
            a, b = (np.where(t, 0.5, w.astype(float)) for w, t in zip(wins, tied, strict=True))
            difference = b - a
            shared = np.repeat(difference[::each], each)
            difference = np.where(rng.random(len(labels)) < 0.7, shared, difference)
            return stats.bounded_mean(difference.tolist(), labels, -1, 1)[1], (second - first) * (1 - ties)

        return draw

    check([of(0.5, 0.5, 0.2), of(0.2, 0.5, 0.0), of(0.9, 0.8, 0.3), of(0.05, 0.1, 0.5)], questions)


def test_a_clean_sweep_is_not_certain() -> None:
    """20 wins of 20 leave room; so do 20 ties, and 20 verdicts that are equal for both models."""
    labels = names(20)
    for scores in ([1.0] * 20, [0.0] * 20, [0.5] * 20):
        actual: Any = summary(judged_scores(scores), "n")["win_rate"]
        assert actual["high"] - actual["low"] > 0.05
        _, interval, p = paired(scores, scores, labels)
        assert interval.low < -0.05 and interval.high > 0.05 and p == 1.0
    assert summary(judged_scores([1.0] * 20), "n")["win_rate"]["low"] < 0.9


# --- sampled text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [10, 20, 100])
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


def test_no_interval_of_one_text() -> None:
    assert quality.shown(stats.ratio([3.0], None, [0]), "texts")["low"] is None
    assert "(3 prefixes)" in quality._cell(quality.shown(stats.ratio([1, 2, 4], None, [0, 1, 2]), "prefixes"))
