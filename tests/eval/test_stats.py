"""Intervals and tests against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import confusion_matrix, f1_score

from eval import stats


def outcomes(n: int, p: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(n) < p


@pytest.mark.parametrize(("n", "p"), [(20, 0.5), (500, 0.9), (3, 0.99), (50, 0.0)])
def test_the_bootstrap_is_the_resampling_one(n: int, p: float) -> None:
    """Percentiles equal those of rows drawn with replacement one by one."""
    right = outcomes(n, p)
    rng = np.random.default_rng(1)
    draws = [rng.choice(right, n).mean() for _ in range(8000)]
    found = stats.accuracy(right.tolist()).bootstrap
    assert (found.low, found.high) == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=1.5 / n)


def test_groups_are_averaged_unweighted_and_resampled_inside() -> None:
    right = np.concatenate([outcomes(400, 0.9), outcomes(10, 0.2, 3)])
    groups = ["big"] * 400 + ["small"] * 10
    found = stats.accuracy(right.tolist(), groups)
    assert found.value == pytest.approx((right[:400].mean() + right[400:].mean()) / 2)
    rng = np.random.default_rng(1)
    draws = [
        (rng.choice(right[:400], 400).mean() + rng.choice(right[400:], 10).mean()) / 2 for _ in range(8000)
    ]
    assert (found.bootstrap.low, found.bootstrap.high) == pytest.approx(
        np.quantile(draws, [0.025, 0.975]), abs=0.02
    )
    assert found.correct == right.sum() and found.n == 410


def test_wilson() -> None:
    found = stats.accuracy([True] * 45 + [False] * 5).wilson  # 45 of 50, from the closed formula
    z, n, p = 1.959964, 50, 0.9
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_intervals_cover() -> None:
    """95 % of intervals hold the true accuracy, give or take."""
    inside = sum(
        (i := stats.accuracy(outcomes(200, 0.7, seed).tolist(), seed=seed).bootstrap).low <= 0.7 <= i.high
        for seed in range(300)
    )
    assert 270 <= inside <= 297


def test_confusion_and_macro_f1_are_sklearns() -> None:
    rng = np.random.default_rng(0)
    labels = ["a", "b", "c"]
    gold, predicted = rng.choice(labels, 200).tolist(), rng.choice(labels, 200, p=[0.6, 0.3, 0.1]).tolist()
    counts = stats.confusion(gold, predicted, labels)
    assert counts == confusion_matrix(gold, predicted, labels=labels).tolist()
    assert stats.macro_f1(counts) == pytest.approx(f1_score(gold, predicted, average="macro"))
    assert stats.macro_f1([[3, 0, 0], [1, 2, 0], [0, 0, 0]]) == pytest.approx((6 / 7 + 4 / 5) / 2)


def test_mcnemar_is_exact() -> None:
    a = [True] * 10 + [False] * 2 + [True] * 50
    b = [False] * 10 + [True] * 2 + [True] * 50
    found = stats.paired(a, b)
    assert (found.only_a, found.only_b) == (10, 2)
    assert found.p_mcnemar == pytest.approx(2 * scipy_stats.binom.cdf(2, 12, 0.5))
    assert found.difference == pytest.approx(-8 / 62)
    assert found.interval.high < 0 and found.p_bootstrap < 0.05


def test_the_paired_bootstrap_is_the_resampling_one() -> None:
    a, b = outcomes(150, 0.6, 1), outcomes(150, 0.66, 2)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 150, (8000, 150))
    draws = (b[rows].astype(int) - a[rows]).mean(axis=1)
    found = stats.paired(a.tolist(), b.tolist())
    assert (found.interval.low, found.interval.high) == pytest.approx(
        np.quantile(draws, [0.025, 0.975]), abs=0.01
    )


def test_equal_models_do_not_differ() -> None:
    a = outcomes(100, 0.5).tolist()
    found = stats.paired(a, a)
    assert (found.difference, found.p_mcnemar, found.p_bootstrap) == (0, 1, 1)


def test_tests_keep_their_level() -> None:
    """Under no difference McNemar's exact test rejects at most 5 %, and Holm over 8 tasks too."""
    alone = family = 0
    for seed in range(60):
        seeds = [1000 * seed + t for t in range(8)]
        p = [stats.paired(outcomes(60, 0.6, s), outcomes(60, 0.6, s + 500)).p_mcnemar for s in seeds]
        alone += p[0] < 0.05
        family += min(stats.holm(p)) < 0.05
    assert alone <= 8 and family <= 8


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


def test_mean_and_deviation_over_seeds() -> None:
    assert stats.mean_sd([0.5, 0.6, 0.7]) == pytest.approx((0.6, 0.1))
    assert stats.mean_sd([0.5]) == (0.5, None)


def test_pairs_must_be_of_the_same_rows() -> None:
    with pytest.raises(ValueError, match="same rows"):
        stats.paired([True], [True, False])
