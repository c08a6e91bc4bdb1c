"""Means, paired differences and verdicts over repetitions, and the best temperature. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import ttest_1samp

from emo.eval.stats import LEVEL, student

Answer = Literal["yes", "no", "undecided"]
WIDEST = 3.0  # of the logarithm of a temperature, up and down


class Estimate(NamedTuple):
    """A mean over repetitions with its Student interval; the interval is nan for a single one."""

    mean: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A paired difference: its mean, interval, and two-sided p-value of Student's paired test."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return mean and interval of values [n]."""
    interval = student(values, level)
    low, high = (interval.low, interval.high) if interval else (math.nan, math.nan)
    return Estimate(float(np.mean(values)), low, high, len(values))


def difference(values: Sequence[float], baseline: Sequence[float], level: float = LEVEL) -> Difference:
    """Return values - baseline, paired by position; both [n]."""
    gaps = np.subtract(values, baseline).tolist()
    mean, low, high, n = estimate(gaps, level)
    if n > 1 and len(set(gaps)) == 1:
        p = float(mean == 0)
    else:
        p = float(ttest_1samp(gaps, 0.0).pvalue) if n > 1 else math.nan
    return Difference(mean, low, high, p, n)


class Verdict(NamedTuple):
    """The answer to a question, and the comparison that decides it."""

    answer: Answer
    effect: float
    low: float
    high: float
    n: int


def verdict(
    better: Sequence[float], others: Sequence[Sequence[float]], least: bool, negligible: float = 0.0
) -> Verdict:
    """Return whether `better` [n] is better than every one of `others`, each [n] and paired with it.

    Every interval has the level that makes all of them hold together (Bonferroni: 1 - 0.05 / comparisons).
    yes: all lie wholly on the better side of `negligible`; no: at least one lies wholly on the other side of
    it, which refutes that `better` beats them all; else undecided. Effects are signed so that above zero is
    better; the one that is reported refutes most clearly, and without a refutation is the least.
    """
    sign = -1.0 if least else 1.0
    level = 1 - (1 - LEVEL) / len(others)
    gaps = [difference([sign * b for b in better], [sign * o for o in other], level) for other in others]
    answer: Answer = "undecided"
    if all(gap.low > negligible for gap in gaps):
        answer = "yes"
    elif any(gap.high < negligible for gap in gaps):
        answer = "no"
    decisive = min(gaps, key=lambda gap: gap.high if answer == "no" else gap.mean)
    return Verdict(answer, decisive.mean, decisive.low, decisive.high, decisive.n)


def at_an_end(chosen: str | float, grid: Iterable[str | float]) -> bool:
    """Return whether a value is the least or largest number of the grid that it was chosen from."""
    try:
        numbers = {float(value) for value in grid}
        return len(numbers) > 1 and float(chosen) in (min(numbers), max(numbers))
    except ValueError:
        return False


def best_temperature(nats: Callable[[float], float]) -> float:
    """Return the temperature with the fewest `nats` per token, between exp(-WIDEST) and exp(WIDEST)."""
    bounds, options = (-WIDEST, WIDEST), {"xatol": 1e-9}
    return math.exp(
        minimize_scalar(lambda t: nats(math.exp(t)), bounds=bounds, method="bounded", options=options).x
    )
