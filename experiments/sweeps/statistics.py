"""Means, paired differences and verdicts over repetitions, and the best temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NotRequired, TypedDict

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import bootstrap, rankdata, ttest_1samp

from emo.eval.results.stats import LEVEL, student

WIDEST = 3.0  # largest absolute log temperature


class Interval(TypedDict):
    """The limits of an interval over n repetitions, NaN for one."""

    low: float
    high: float
    n: int


class Estimate(Interval):
    """A mean over repetitions."""

    mean: float


class Difference(Estimate):
    """A paired difference from a baseline."""

    p: float  # of Student's test
    p_holm: NotRequired[float]  # corrected over all rows of a metric


class Verdict(Interval):
    """An answer, and the decisive difference. Above zero is better."""

    answer: str  # yes, no or undecided
    effect: float


class CellVerdict(Verdict):
    """The verdict on a question in a cell of a study."""

    outcome: str


class MapRow(TypedDict):
    """A cell of a study in map.json."""

    V: int
    share: float
    draws: int
    verdicts: dict[str, CellVerdict]  # by question


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return the mean of repetitions with Student's interval."""
    interval = student(values, level)
    low, high = (interval.low, interval.high) if interval else (math.nan, math.nan)
    return {"mean": float(np.mean(values)), "low": low, "high": high, "n": len(values)}


def paired_difference(values: Sequence[float], baseline: Sequence[float], level: float = LEVEL) -> Difference:
    """Return the estimate of values - baseline, paired by position.

    Equal gaps show no spread, as with two seeds whose accuracies differ by the same number of rows. They have
    no interval and no p-value, unless they are zero (p = 1).
    """
    gaps = np.subtract(values, baseline)
    result = estimate(gaps.tolist(), level)
    if len(gaps) < 2:
        return {**result, "p": math.nan}
    if np.ptp(gaps) <= 1e-12 * np.abs(gaps).max():
        if not gaps.any():
            return {**result, "p": 1.0}
        return {**result, "low": math.nan, "high": math.nan, "p": math.nan}
    return {**result, "p": float(ttest_1samp(gaps, 0.0).pvalue)}


def rank_correlation(x: Sequence[float], y: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return Spearman's correlation of the pairs in which both are finite, with a BCa bootstrap interval.

    `mean` is the correlation. It is NaN if a side has only one value.
    """
    pairs = np.array([pair for pair in zip(x, y, strict=True) if np.isfinite(pair).all()])
    result: Estimate = {"mean": math.nan, "low": math.nan, "high": math.nan, "n": len(pairs)}
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in pairs.T):
        return result

    def correlation(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        ranks = (rankdata(side, axis=axis) for side in (a, b))
        a, b = (rank - rank.mean(axis, keepdims=True) for rank in ranks)
        norm = np.sqrt((a * a).sum(axis) * (b * b).sum(axis))
        # A sample of few pairs may have one value only, and shows no correlation then.
        return np.divide((a * b).sum(axis), norm, out=np.zeros_like(norm), where=norm > 0)

    result["mean"] = float(correlation(*pairs.T))
    interval = bootstrap(tuple(pairs.T), correlation, paired=True, vectorized=True, n_resamples=4999,
                         confidence_level=level, rng=0).confidence_interval  # fmt: skip
    result["low"], result["high"] = float(interval.low), float(interval.high)
    return result


def paired_verdict(
    better: Sequence[float], others: Sequence[Sequence[float]], least: bool, level: float = LEVEL
) -> Verdict:
    """Decide whether `better` beats all of `others`, by simultaneous paired intervals (Bonferroni).

    The `answer` is yes if all intervals lie on the better side of zero, no if at least one lies on the other
    side, and else undecided. `effect`, `low` and `high` belong to the clearest refutation, or without one to
    a comparison with a missing value, or else to the smallest effect. Above zero is better.

    Args:
        better: Values [n] by repetition.
        others: Values of the others, each [n].
        least: Whether lower values are better.
        level: Simultaneous level of the intervals.
    """
    sign = -1.0 if least else 1.0
    each = 1 - (1 - level) / len(others)
    gaps = [
        paired_difference([sign * b for b in better], [sign * o for o in other], each) for other in others
    ]
    answer = "undecided"
    if all(gap["low"] > 0 for gap in gaps):
        answer = "yes"
    elif any(gap["high"] < 0 for gap in gaps):
        answer = "no"
    if answer == "no":
        decisive = min((gap for gap in gaps if gap["high"] < 0), key=lambda gap: gap["high"])
    else:
        decisive = min(gaps, key=lambda gap: (not math.isnan(gap["mean"]), gap["mean"]))
    low, high, effect = decisive["low"], decisive["high"], decisive["mean"]
    return {"answer": answer, "effect": effect, "low": low, "high": high, "n": len(better)}


def is_grid_end(chosen: str | float, grid: Iterable[str | float]) -> bool:
    """Return whether a chosen value is the smallest or largest number of its grid."""
    try:
        numbers = {float(value) for value in grid}
        return len(numbers) > 1 and float(chosen) in (min(numbers), max(numbers))
    except ValueError:
        return False


def find_best_temperature(nats: Callable[[float], float]) -> float:
    """Return the temperature that minimises `nats`, between exp(-WIDEST) and exp(WIDEST)."""
    result = minimize_scalar(
        lambda t: nats(math.exp(t)), bounds=(-WIDEST, WIDEST), method="bounded", options={"xatol": 1e-9}
    )
    return math.exp(result.x)
