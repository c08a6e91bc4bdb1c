"""Accuracies, intervals and paired tests from the outcomes of rows. Pure functions.

- An accuracy has Wilson's interval. The difference of two models on the same rows has the interval of Bonett
  and Price (2012). Both keep their level with few rows and at 0 and 100 %, where a bootstrap interval has no
  width.
- A mean of bounded values, such as a judge's scores with half points, has Wilson's interval for the number of
  rows that gives the same variance. A mean of unbounded values has Student's interval over clusters.
- A task may be scored as the unweighted mean over groups (MMLU over subjects). Its interval is that of the
  number of ungrouped rows with the same variance. The variance of each group is estimated with PRIOR_ROWS
  rows of the overall rates added, because a group of one row has no variance estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

import numpy as np
from scipy import stats

LEVEL = 0.95
PRIOR_ROWS = 2.0
TINY = 1e-12  # a difference that is due to rounding
DRAWS = 20_000  # random signs in a test
BATCH = 500  # random signs at a time
_Z = float(stats.norm.ppf((1 + LEVEL) / 2))


@dataclass(frozen=True)
class Interval:
    """A confidence interval, at 95 % by default."""

    low: float
    high: float


class AccuracyNumbers(TypedDict):
    """An accuracy as results store it."""

    accuracy: float
    n: int
    correct: int
    interval: dict[str, float]


@dataclass(frozen=True)
class Accuracy:
    """value: mean outcome, or the unweighted mean over groups."""

    value: float
    n: int
    correct: int
    interval: Interval

    def to_json(self) -> AccuracyNumbers:
        """Return the numbers for a result."""
        ends = asdict(self.interval)
        return {"accuracy": self.value, "n": self.n, "correct": self.correct, "interval": ends}


def bounded_mean(
    values: Sequence[float], clusters: Sequence[str], low: float = 0.0, high: float = 1.0
) -> tuple[float, Interval]:
    """Return the mean of values [n] and its 95 % interval.

    The interval is Wilson's for the number of rows that gives the variance of the mean. That variance is
    shrunk towards the variance of one row per cluster, with the weight of one cluster, because few or equal
    values underestimate it.

    Args:
        values: N > 0 values from `low` to `high`.
        clusters: The cluster of each value [n]. Values of a cluster may depend on each other.
        low: Smallest possible value.
        high: Largest possible value.
    """
    scaled = (np.asarray(values, float) - low) / (high - low)
    _, cluster_index = np.unique(np.asarray(clusters), return_inverse=True)
    mean = float(scaled.mean())
    sizes = np.bincount(cluster_index)
    count = len(sizes)
    single = mean * (1 - mean) / count
    moved = np.bincount(cluster_index, weights=scaled) - sizes * mean
    spread = float((moved**2).sum()) / len(scaled) ** 2 * count / (count - 1) if count > 1 else single
    variance = (count * spread + single) / (count + 1)
    interval = _wilson(mean, mean * (1 - mean) / variance if variance > 0 else count)
    width = high - low
    return low + width * mean, Interval(low + width * interval.low, low + width * interval.high)


@dataclass(frozen=True)
class Estimate:
    """A mean or a ratio of sums, and the first-order influence of each cluster on it.

    parts: the influences, which sum to zero. shares: each cluster's share of the weight. A cluster with a
    large share pulls the estimate towards itself, so its part is too small by the factor sqrt(1 - share)
    (Bell and McCaffrey's CR2).
    """

    value: float
    parts: np.ndarray  # [clusters]
    shares: np.ndarray  # [clusters], summing to 1

    def __sub__(self, other: Estimate) -> Estimate:
        """Return the difference of two models on the same clusters."""
        shares = (self.shares + other.shares) / 2
        return Estimate(self.value - other.value, self.parts - other.parts, shares)

    def interval(self, level: float = LEVEL) -> Interval | None:
        """Return Student's interval over clusters, or None if a single cluster has all the weight.

        The degrees of freedom are those of equal clusters with the same sum of squared shares.
        """
        if (spread := self._spread()) is None:
            return None
        error, freedom = spread
        half = float(stats.t.ppf((1 + level) / 2, freedom)) * error
        return Interval(self.value - half, self.value + half)

    def p_value(self) -> float:
        """Return the two-sided p-value of Student's test that the estimate is zero, 1 for one cluster.

        If all clusters are equal, it is the limit for a small spread.
        """
        if (spread := self._spread()) is None or abs(self.value) < TINY:
            return 1.0
        error, freedom = spread
        return 2 * float(stats.t.sf(abs(self.value) / error, freedom)) if error else 0.0

    def _spread(self) -> tuple[float, float] | None:
        """Return standard error and degrees of freedom."""
        if len(self.parts) < 2 or self.shares.max() > 1 - 1e-9:
            return None
        error = math.sqrt(float((self.parts**2 / (1 - self.shares)).sum()))
        return error, max(1.0, 1 / float((self.shares**2).sum()) - 1)


def ratio(values: Sequence[float], weights: Sequence[float] | None, clusters: Sequence[int]) -> Estimate:
    """Return the sum of `values` [n] divided by the sum of `weights` [n] (None: n), with sorted clusters."""
    _, cluster_index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(cluster_index, weights=np.asarray(values, float))
    sizes = np.bincount(cluster_index, weights=None if weights is None else np.asarray(weights, float))
    value = float(sums.sum() / sizes.sum()) if sizes.any() else math.nan
    total = max(float(sizes.sum()), 1e-300)
    return Estimate(value, (sums - value * sizes) / total, sizes / total)


def estimate_measure(
    values: Sequence[float], weights: Sequence[float], scale: str, clusters: Sequence[int] | None = None
) -> Estimate:
    """Return a measure that rows add up to, as an estimate that can be compared between models.

    Args:
        values: For each row [n], the value, or a log-probability in nats.
        weights: Weight of each row [n], for example its number of words.
        scale: `mean` (weighted mean of the values), `perplexity` (negative log-probability per unit of
            weight, which is the logarithm of the perplexity) or `bits` (the same in bits).
        clusters: Cluster of each row [n]. The default is a cluster for each row.
    """
    factor = {"mean": 1.0, "perplexity": -1.0, "bits": -1 / math.log(2)}[scale]
    return ratio([factor * value for value in values], weights, clusters or range(len(values)))


def compare_scores(
    first: Sequence[float], second: Sequence[float], clusters: Sequence[str], seed: int = 0
) -> tuple[float, Interval, float]:
    """Return the mean of second - first, its 95 % interval, and a two-sided p-value.

    Under the null hypothesis the sign of each cluster's difference is random.

    Args:
        first: Scores [n] of a model, from 0 to 1.
        second: Scores [n] of another model on the same rows.
        clusters: The cluster of each row [n]. Scores of a cluster may depend on each other.
        seed: Seed of the random signs.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    mean, interval = bounded_mean(differences.tolist(), clusters, -1.0, 1.0)
    _, cluster_index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(cluster_index, weights=differences)
    sums = sums[sums != 0]
    rng = np.random.default_rng(seed)
    as_far = 0
    for _ in range(0, DRAWS, BATCH):
        signs = rng.choice([-1.0, 1.0], (BATCH, len(sums)))
        as_far += int((np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9).sum())
    return mean, interval, (as_far + 1) / (DRAWS + 1)


def student(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return Student's interval for the mean of values [n], for example over seeds. None for one value."""
    return ratio(values, None, range(len(values))).interval(level)


def accuracy(correct: Sequence[bool], groups: Sequence[str] | None = None) -> Accuracy:
    """Return the accuracy of outcomes [n], n > 0. With groups [n] it is the unweighted mean over groups."""
    outcomes = np.asarray(correct, dtype=bool)
    (value, _), rows = _rates(_counts([outcomes, ~outcomes], groups), np.array([1.0, 0.0]))
    return Accuracy(value, len(outcomes), int(outcomes.sum()), _wilson(value, rows))


def confusion(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[list[int]]:
    """Return counts [gold][predicted] in the order of `labels`."""
    index = {label: i for i, label in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=int)
    np.add.at(counts, ([index[g] for g in gold], [index[p] for p in predicted]), 1)
    return counts.tolist()


def macro_f1(counts: Sequence[Sequence[int]]) -> float:
    """Return the unweighted mean of the labels' F1, without labels that are neither present nor predicted."""
    matrix = np.asarray(counts, dtype=float)
    hit = matrix.diagonal()
    total = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * hit[total > 0] / total[total > 0]).mean())


@dataclass(frozen=True)
class Paired:
    """Two models on the same rows. difference: score of b minus score of a."""

    difference: float
    interval: Interval
    only_a: int  # rows that only a gets right
    only_b: int
    p_mcnemar: float  # exact, two-sided, on pooled rows


@dataclass(frozen=True)
class MeanDifference:
    """The mean over tasks of the differences between two models."""

    difference: float
    interval: Interval
    p: float  # two-sided, random signs


def count_pairs(a: Sequence[bool], b: Sequence[bool], groups: Sequence[str] | None = None) -> np.ndarray:
    """Return counts [3, groups] of rows that only a, only b, or both or neither get right.

    a, b: outcomes [n] of the same rows. Raises ValueError when their lengths differ.
    """
    first = np.asarray(a, dtype=bool)
    second = np.asarray(b, dtype=bool)
    return _counts([first & ~second, second & ~first, first == second], groups)


def compare_paired(pairs: np.ndarray) -> Paired:
    """Return difference, Bonett and Price's interval and McNemar's exact test for the counts of a task.

    The interval is Wald's with one row added to either kind of disagreement.
    """
    (worse, better, _), n = _rates(pairs, np.array([-1.0, 1.0, 0.0]))
    worse, better = ((rate * n + 1) / (n + 2) for rate in (worse, better))
    centre = better - worse
    half = _Z * math.sqrt((worse + better - centre**2) / (n + 2))
    interval = Interval(max(-1.0, centre - half), min(1.0, centre + half))
    difference = float(((pairs[1] - pairs[0]) / pairs.sum(axis=0)).mean())
    only_a, only_b, _ = pairs.sum(axis=1).tolist()
    return Paired(difference, interval, only_a, only_b, _sign_test(only_a, only_b))


def mean_difference(tasks: Sequence[np.ndarray], seed: int = 0) -> MeanDifference:
    """Return the mean difference over the paired counts of tasks with equal weights.

    The test is McNemar's for rows of unequal weight. Under the null hypothesis each row that only one model
    gets right is equally likely to be either model's.
    """
    differences = [compare_paired(task) for task in tasks]
    difference, interval = mean_interval(
        [(p.difference, p.interval.low, p.interval.high) for p in differences]
    )
    discordant: dict[float, np.ndarray] = {}  # weight of a row -> counts of (only a, only b)
    for task in tasks:
        weights = 1 / (task.sum(axis=0) * task.shape[1] * len(tasks))
        for weight, counts in zip(weights, task[:2].T, strict=True):
            if counts.any():
                key = float(f"{weight:.12g}")
                discordant[key] = discordant.get(key, 0) + counts
    return MeanDifference(difference, interval, _weighted_sign_test(discordant, seed))


def _weighted_sign_test(discordant: dict[float, np.ndarray], seed: int) -> float:
    """Return the two-sided p-value of random signs. discordant: weight of a row -> (only a, only b)."""
    if len(discordant) < 2:
        return _sign_test(*sum(discordant.values(), np.zeros(2, int)))
    rng = np.random.default_rng(seed)
    drawn = np.zeros(DRAWS)
    observed = 0.0
    squares = 0.0
    for weight, (only_a, only_b) in discordant.items():
        both = only_a + only_b
        drawn += weight * (2 * rng.binomial(both, 0.5, DRAWS) - both)
        observed += weight * (only_b - only_a)
        squares += weight**2 * both
    as_far = (np.abs(drawn) >= abs(observed) - 1e-12).sum()
    bound = 2 * math.exp(-(observed**2) / (2 * squares))  # Hoeffding's: lower than draws can resolve
    return min(float((as_far + 1) / (DRAWS + 1)), bound)


def mean_interval(means: Sequence[tuple[float, float, float]]) -> tuple[float, Interval]:
    """Return the mean of independent (value, low, high) with its interval, whose squared widths add up."""
    n = len(means)
    mean = sum(value for value, _, _ in means) / n
    down = math.hypot(*(value - low for value, low, _ in means)) / n
    up = math.hypot(*(high - value for value, _, high in means)) / n
    return mean, Interval(mean - down, mean + up)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjustment of a family of p-values. NaN stays NaN and is not counted."""
    adjusted = np.array(p_values, dtype=float)
    order = np.argsort(adjusted, kind="stable")[: np.isfinite(adjusted).sum()]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * adjusted[order]))
    return adjusted.tolist()


def _counts(kinds: Sequence[np.ndarray], groups: Sequence[str] | None) -> np.ndarray:
    """Return the number of rows of each kind (bool [n]) per group, int [kinds, groups]."""
    if groups is None:
        return np.array([[int(kind.sum())] for kind in kinds])
    _, codes = np.unique(np.asarray(groups), return_inverse=True)
    return np.array([np.bincount(codes, weights=kind).astype(int) for kind in kinds])


def _rates(counts: np.ndarray, values: np.ndarray) -> tuple[list[float], float]:
    """Return the rate of each kind of row, averaged over groups, and the equivalent number of ungrouped rows.

    counts: [kinds, groups]. values: the value of a row of each kind [kinds].
    """
    sizes = counts.sum(axis=0)
    rates = (counts / sizes).mean(axis=1)
    pooled = _variance(rates, values)
    if len(sizes) == 1:
        return rates.tolist(), float(sizes[0])
    if pooled < 1e-12:
        return rates.tolist(), len(sizes) ** 2 / float((1 / sizes).sum())
    shrunk = (counts + PRIOR_ROWS * rates[:, None]) / (sizes + PRIOR_ROWS)
    # Unbiased if all groups have the same rates.
    variances = _variance(shrunk, values) / (1 - sizes / (sizes + PRIOR_ROWS) ** 2)
    return rates.tolist(), float(pooled * len(sizes) ** 2 / (variances / sizes).sum())


def _variance(rates: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the variance of a row's value. rates: [kinds] or [kinds, groups]."""
    return values**2 @ rates - (values @ rates) ** 2


def _wilson(rate: float, n: float) -> Interval:
    centre = (rate + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z**2 / (4 * n**2))
    return Interval(min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half)))


def _sign_test(only_a: int, only_b: int) -> float:
    return float(stats.binomtest(int(only_a), max(int(only_a + only_b), 1), 0.5).pvalue)
