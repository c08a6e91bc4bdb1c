"""Means, paired differences and verdicts over repetitions. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from eval.stats import LEVEL, student

Answer = Literal["yes", "no", "undecided"]


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
    """Mean and interval of values [n]."""
    array = np.asarray(values, dtype=float)
    n, mean = len(array), float(array.mean())
    interval = student(array, level)  # type: ignore[arg-type]
    if interval is None:
        return Estimate(mean, math.nan, math.nan, n)
    return Estimate(mean, interval.low, interval.high, n)


def difference(ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL) -> Difference:
    """ours - theirs, paired by place; both [n]."""
    gaps = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    mean, low, high, n = estimate(gaps, level)
    spread = float(gaps.std(ddof=1)) if n > 1 else math.nan
    if n < 2:
        p = math.nan
    elif spread == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = float(2 * stats.t.sf(abs(mean) / (spread / math.sqrt(n)), n - 1))
    return Difference(mean, low, high, p, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order; nan stays nan and is not counted."""
    known = [(p, i) for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted, largest = list(p_values), 0.0
    for place, (p, i) in enumerate(sorted(known)):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        adjusted[i] = largest
    return adjusted


class Verdict(NamedTuple):
    """The answer to a question, and the weakest of the comparisons that it rests on."""

    answer: Answer
    effect: float
    low: float
    high: float
    n: int


def verdict(
    better: Sequence[float], others: Sequence[Sequence[float]], least: bool, negligible: float = 0.0
) -> Verdict:
    """Is `better` [n] better than every one of `others`, each [n] and paired with it?

    Every interval has the level that makes all of them hold together (Bonferroni: 1 - 0.05 / comparisons).
    yes: all lie wholly on the better side of `negligible`; no: all lie wholly on the other side of it;
    else undecided. Effects are signed so that above zero is better; the least of them is reported.
    """
    sign = -1.0 if least else 1.0
    level = 1 - (1 - LEVEL) / len(others)
    gaps = [difference([sign * b for b in better], [sign * o for o in other], level) for other in others]
    weakest = min(gaps, key=lambda gap: gap.mean)
    answer: Answer = "undecided"
    if all(gap.low > negligible for gap in gaps):
        answer = "yes"
    elif all(gap.high < negligible for gap in gaps):
        answer = "no"
    return Verdict(answer, weakest.mean, weakest.low, weakest.high, weakest.n)
