"""Accuracies, intervals and paired tests from per-row outcomes. Pure functions.

Accuracy is a mean of 0/1 outcomes, so resampling its rows with replacement is a binomial draw (for pairs a
multinomial one): the bootstrap below is drawn from that law directly, with no resampling loop. Tasks scored
as a mean over groups (MMLU) are resampled inside their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

DRAWS = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Accuracy:
    """value: mean outcome, or mean over groups of it."""

    value: float
    n: int
    correct: int
    bootstrap: Interval
    wilson: Interval  # of the pooled rows, whatever the grouping


def accuracy(correct: Sequence[bool], groups: Sequence[str] | None = None, seed: int = 0) -> Accuracy:
    """Accuracy of outcomes [n]; with groups [n] the unweighted mean over groups."""
    outcomes = np.asarray(correct, dtype=bool)
    sizes, hits = _by_group(outcomes, groups)
    rng = np.random.default_rng(seed)
    draws = (rng.binomial(sizes, hits / sizes, size=(DRAWS, len(sizes))) / sizes).mean(axis=1)
    test = stats.binomtest(int(outcomes.sum()), len(outcomes))
    low, high = test.proportion_ci(LEVEL, method="wilson")
    return Accuracy(
        value=float((hits / sizes).mean()),
        n=len(outcomes),
        correct=int(outcomes.sum()),
        bootstrap=_percentiles(draws),
        wilson=Interval(float(low), float(high)),
    )


def confusion(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[list[int]]:
    """Counts [gold][predicted] in the order of `labels`."""
    place = {label: i for i, label in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=int)
    for g, p in zip(gold, predicted, strict=True):
        counts[place[g], place[p]] += 1
    return counts.tolist()


def macro_f1(counts: Sequence[Sequence[int]]) -> float:
    """Unweighted mean of the labels' F1; a label neither present nor predicted is left out."""
    matrix = np.asarray(counts, dtype=float)
    hit = matrix.diagonal()
    total = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * hit[total > 0] / total[total > 0]).mean())


@dataclass(frozen=True)
class Paired:
    """Two models on the same rows. difference: accuracy of b less accuracy of a."""

    difference: float
    interval: Interval  # paired bootstrap
    only_a: int  # rows that a alone gets right
    only_b: int
    p_mcnemar: float  # exact, two-sided, on pooled rows
    p_bootstrap: float  # two-sided


def paired(
    a: Sequence[bool], b: Sequence[bool], groups: Sequence[str] | None = None, seed: int = 0
) -> Paired:
    """Compare outcomes a and b [n] of the same rows."""
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if len(first) != len(second):
        raise ValueError("paired outcomes must be of the same rows")
    sizes, only_a = _by_group(first & ~second, groups)
    _, only_b = _by_group(second & ~first, groups)
    rng = np.random.default_rng(seed)
    draws = np.zeros(DRAWS)
    for n, x, y in zip(sizes, only_a, only_b, strict=True):
        drawn = rng.multinomial(n, [x / n, y / n, 1 - (x + y) / n], size=DRAWS)
        draws += (drawn[:, 1] - drawn[:, 0]) / n / len(sizes)
    discordant = int(only_a.sum() + only_b.sum())
    p_mcnemar = stats.binomtest(int(only_a.sum()), discordant, 0.5).pvalue if discordant else 1.0
    # Share of resamples on the other side of zero; the observed sample counts as one of them.
    below, above = (draws <= 0).sum() + 1, (draws >= 0).sum() + 1
    return Paired(
        difference=float(((only_b - only_a) / sizes).mean()),
        interval=_percentiles(draws),
        only_a=int(only_a.sum()),
        only_b=int(only_b.sum()),
        p_mcnemar=float(p_mcnemar),
        p_bootstrap=float(min(1.0, 2 * min(below, above) / (DRAWS + 1))),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment over a family of tests."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = running
    return adjusted.tolist()


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds; None for a single one."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def as_dict(value: Accuracy | Paired) -> dict[str, object]:
    """For JSON."""
    return asdict(value)


def _by_group(outcomes: np.ndarray, groups: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """(rows, true outcomes) per group; one group when none are given."""
    if groups is None:
        return np.array([len(outcomes)]), np.array([int(outcomes.sum())])
    _, codes = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(codes), np.bincount(codes, weights=outcomes).astype(int)


def _percentiles(draws: np.ndarray) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(float(low), float(high))
