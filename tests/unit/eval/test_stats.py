"""Intervals and tests equal independent computations, and intervals have their nominal coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import confusion_matrix, f1_score

from emo.eval.generation import quality
from emo.eval.generation.likelihood import Likelihood
from emo.eval.report.compare import ALPHA, _direction, checkpoint_levels
from emo.eval.results import stats


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (28, 0), (500, 500), (7, 3)])
def test_an_accuracy_has_wilsons_interval(n: int, correct: int) -> None:
    """Even an accuracy of 0 % or 100 % has an interval."""
    outcomes = [True] * correct + [False] * (n - correct)
    expected = scipy_stats.binomtest(correct, n).proportion_ci(0.95, method="wilson")
    for groups in (None, [str(i) for i in range(n)]):
        actual = stats.accuracy(outcomes, groups)
        assert 0 <= actual.interval.low <= actual.value <= actual.interval.high <= 1
        if groups is None or correct in (0, n):
            assert (actual.interval.low, actual.interval.high) == pytest.approx((expected.low, expected.high))


def test_groups_have_equal_weights_and_separate_variances() -> None:
    right = [True] * 360 + [False] * 40 + [True] * 20 + [False] * 80
    actual = stats.accuracy(right, ["big"] * 400 + ["small"] * 100)
    half = 1.96 * np.sqrt(0.9 * 0.1 / 400 + 0.2 * 0.8 / 100) / 2
    assert (actual.value, actual.correct, actual.n) == (pytest.approx(0.55), 380, 500)
    assert (actual.interval.high - actual.interval.low) / 2 == pytest.approx(half, rel=0.05)


SIZES = {
    "1 row": [1] * 57,
    "1 to 40 rows": [1, 1, 2, 2, 3, 4, 6, 8, 12, 16, 20, 30, 40] * 3,
    "no groups": [200],
}


@pytest.mark.parametrize("name", SIZES)
def test_intervals_have_their_nominal_coverage(name: str) -> None:
    """95 % intervals cover the true accuracy, the true difference and the true mean over tasks."""
    sizes = np.array(SIZES[name])
    groups = np.arange(len(sizes)).repeat(sizes)
    rng = np.random.default_rng(len(name))
    inside, rounds = np.zeros(3), 400
    for number in range(rounds):
        accuracy = (0.3, 0.6, 0.9)[number % 3]
        p = rng.beta(5 * accuracy, 5 * (1 - accuracy), len(sizes))  # easy and hard subjects
        truth = (0.85 * p + 0.1 * (1 - p)).mean() - p.mean()
        a = rng.random(len(groups)) < p.repeat(sizes)
        b = np.where(a, rng.random(len(a)) < 0.85, rng.random(len(a)) < 0.1)
        other = stats.compare_paired(stats.count_pairs(rng.random(300) < 0.8, rng.random(300) < 0.75))
        pair = stats.compare_paired(stats.count_pairs(a, b, groups))
        _, mean = stats.mean_interval(
            [(x.difference, x.interval.low, x.interval.high) for x in (pair, other)]
        )
        accuracy_interval = stats.accuracy(a, groups).interval
        actual = [(accuracy_interval, p.mean()), (pair.interval, truth), (mean, (truth - 0.05) / 2)]
        inside += [i.low <= true <= i.high for i, true in actual]
    assert (inside / rounds >= 0.93).all(), inside / rounds


def test_confusion_and_macro_f1_equal_those_of_sklearn() -> None:
    rng = np.random.default_rng(0)
    labels = ["a", "b", "c"]
    gold, predicted = rng.choice(labels, 200).tolist(), rng.choice(labels, 200, p=[0.6, 0.3, 0.1]).tolist()
    counts = stats.confusion(gold, predicted, labels)
    assert counts == confusion_matrix(gold, predicted, labels=labels).tolist()
    assert stats.macro_f1(counts) == pytest.approx(f1_score(gold, predicted, average="macro"))
    assert stats.macro_f1([[3, 0, 0], [1, 2, 0], [0, 0, 0]]) == pytest.approx((6 / 7 + 4 / 5) / 2)


def test_mcnemar_is_exact_and_the_paired_interval_bonett_and_prices() -> None:
    a, b = [True] * 12 + [False] * 88, [False] * 9 + [True] * 3 + [True] * 4 + [False] * 84
    actual = stats.compare_paired(stats.count_pairs(a, b))
    assert (actual.only_a, actual.only_b, actual.difference) == (9, 4, pytest.approx(-0.05))
    assert actual.p_mcnemar == pytest.approx(2 * scipy_stats.binom.cdf(4, 13, 0.5))
    p12, p21 = 10 / 102, 5 / 102
    half = 1.959964 * np.sqrt((p12 + p21 - (p21 - p12) ** 2) / 102)
    expected = (p21 - p12 - half, p21 - p12 + half)
    assert (actual.interval.low, actual.interval.high) == pytest.approx(expected, abs=1e-6)


def test_the_test_of_the_mean_is_that_of_random_signs() -> None:
    """The reference uses all sign patterns of a few rows with unequal weights."""
    first = stats.count_pairs([True] * 6 + [False] * 4, [False] * 5 + [True] + [True] + [False] * 3)
    second = stats.count_pairs([True] * 3 + [False] * 37, [False] * 3 + [True] * 2 + [False] * 35)
    weights = np.array([1 / 20] * 6 + [1 / 80] * 5)
    signs = np.array(list(itertools.product((-1, 1), repeat=11)))
    observed = abs(-4 / 20 - 1 / 80)
    exact = (np.abs(signs @ weights) >= observed - 1e-12).mean()
    assert stats.mean_difference([first, second]).p == pytest.approx(exact, abs=0.01)


def test_holms_correction() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


DRAWS = 300
VERDICTS = ((0.5, 0.0), (0.3, 0.2), (0.1, 0.1), (0.85, 0.1), (0.02, 0.9), (0.2, 0.6))  # wins, ties


@pytest.mark.parametrize(("questions", "each", "alike"), [(10, 1, 0), (50, 1, 0), (20, 3, 0.7)])
def test_win_rate_intervals_have_their_nominal_coverage(questions: int, each: int, alike: float) -> None:
    """Pairs of the same question may be correlated."""
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


def test_the_interval_of_a_clean_sweep_has_width() -> None:
    """An interval has width after 20 wins, 20 ties, or 20 equal verdicts for both models."""
    labels = [str(i) for i in range(20)]
    for score in (0.0, 0.5, 1.0):
        value, interval = stats.bounded_mean([score] * 20, labels)
        assert value == score and interval.high - interval.low > 0.05 and interval.low < 0.9
        difference, interval, p = stats.compare_scores([score] * 20, [score] * 20, labels)
        assert interval.low < -0.05 and interval.high > 0.05 and (difference, p) == (0, 1)


def test_equal_differences_of_all_clusters_are_significant() -> None:
    """A model that finds no passkey at the longest length loses as much in every cluster."""
    clusters = [str(i) for i in range(10) for _ in range(4)]
    found, lost = [1.0] * 40, [1.0, 1.0, 1.0, 0.0] * 10
    difference, interval, p = stats.compare_scores(found, lost, clusters)
    assert difference == -0.25 and p < 0.01 and interval.high < 0
    estimates = [stats.ratio(values, None, list(map(int, clusters))) for values in (found, lost)]
    assert (estimates[1] - estimates[0]).p_value() < 1e-9
    assert (estimates[1] - estimates[1]).p_value() == 1


def test_measures_of_texts_and_perplexities() -> None:
    """Texts after the same prefix are correlated, within a model and between two models."""
    rng, clusters = np.random.default_rng(0), np.repeat(np.arange(10), 3)
    inside, widths = [], []
    for _ in range(2 * DRAWS):
        hardness, estimates = np.repeat(rng.normal(0, 0.5, 10), 3), []
        for shift in (0.0, 0.1):
            tokens = rng.integers(5, 40, 30)
            nll = tokens * (3 + shift + hardness + rng.normal(0, 0.3, 30))
            estimates.append(Likelihood(nll, tokens).estimate(clusters.tolist()))
        first, difference = estimates[0].interval(), (estimates[1] - estimates[0]).interval()
        assert first is not None and difference is not None
        perplexity = quality.summarise(estimates[0], "prefixes", math.exp)
        of_perplexity = perplexity["low"] <= math.exp(3) <= perplexity["high"]
        of_difference = difference.low <= 0.1 <= difference.high
        inside.append([first.low <= 3 <= first.high, of_perplexity, of_difference])
        widths.append((first.high - first.low) / (difference.high - difference.low))
    covered = np.mean(inside, axis=0)
    assert covered.min() >= 0.92 and covered.max() <= 0.98
    assert np.mean(widths) > 1.5  # pairing makes intervals narrower
    assert stats.ratio([3.0], None, [0]).interval() is None, "one text says nothing"


def test_perplexities_of_a_few_unequal_documents_are_covered() -> None:
    """One of five documents may have most of the tokens. `student` gives Student's interval."""
    rng, inside, runs = np.random.default_rng(1), 0, 1500
    for _ in range(runs):
        tokens = np.maximum(5, rng.lognormal(4.5, 1.0, 5)).astype(int)
        sums = tokens * rng.normal(3, 0.4, 5) + 2 * np.sqrt(tokens) * rng.standard_normal(5)
        interval = stats.ratio(sums.tolist(), tokens.tolist(), range(5)).interval()
        assert interval is not None
        inside += interval.low <= 3 <= interval.high
    assert 0.93 < inside / runs < 0.985
    values = rng.standard_normal(7)
    low, high = scipy_stats.t.interval(0.95, 6, values.mean(), values.std(ddof=1) / 7**0.5)
    same = stats.student(values.tolist())
    assert same is not None and (same.low, same.high) == pytest.approx((low, high))


def test_a_run_of_equal_checkpoints_rarely_raises_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 checkpoints equal the baseline on two tasks. At most 5 % of the runs get an alarm."""
    monkeypatch.setattr(stats, "DRAWS", 500)
    rng, runs, alarms = np.random.default_rng(1), 25, 0
    alphas = checkpoint_levels(20, 19)
    assert (
        sum(alphas) <= ALPHA and sum(checkpoint_levels(5000, None)) <= ALPHA / 2 and alphas[19] == ALPHA / 2
    )
    for _ in range(runs):
        hard = [rng.beta(2, 1, 150) for _ in range(2)]
        base = [rng.random(150) < p for p in hard]
        for alpha in alphas:
            pairs = [stats.count_pairs(a, rng.random(150) < p) for a, p in zip(base, hard, strict=True)]
            paired = [stats.compare_paired(p) for p in pairs]
            adjusted = stats.holm([p.p_mcnemar for p in paired])
            mean = stats.mean_difference(pairs)
            tests = [(p.difference, p.interval, q) for p, q in zip(paired, adjusted, strict=True)]
            tests.append((mean.difference, mean.interval, mean.p))
            if any(_direction(*test, alpha) < 0 for test in tests):
                alarms += 1
                break
    assert alarms / runs <= 0.05
