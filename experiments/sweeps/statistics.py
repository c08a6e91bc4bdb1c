"""Means, paired differences and verdicts over repetitions, and the best temperature. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import ttest_1samp

from emo.eval.results.stats import LEVEL, student

WIDEST = 3.0  # of the logarithm of a temperature, up and down


def estimate(values: Sequence[float], level: float = LEVEL) -> dict[str, float]:
    """Return `mean`, `low` and `high` of Student's interval, and `n` of values [n]; NaN for a single one."""
    interval = student(values, level)
    low, high = (interval.low, interval.high) if interval else (math.nan, math.nan)
    return {"mean": float(np.mean(values)), "low": low, "high": high, "n": len(values)}


def difference(values: Sequence[float], baseline: Sequence[float], level: float = LEVEL) -> dict[str, float]:
    """Return the estimate of values - baseline, paired by position, both [n], and `p` of Student's test."""
    gaps = np.subtract(values, baseline).tolist()
    result = estimate(gaps, level)
    if len(gaps) > 1 and len(set(gaps)) == 1:
        p = float(result["mean"] == 0)
    else:
        p = float(ttest_1samp(gaps, 0.0).pvalue) if len(gaps) > 1 else math.nan
    return {**result, "p": p}


def verdict(
    better: Sequence[float], others: Sequence[Sequence[float]], least: bool, level: float = LEVEL
) -> dict[str, Any]:
    """Return whether `better` [n] is better than every one of `others`, each [n] and paired with it.

    `answer` is yes when all intervals lie wholly on the better side of zero; no when at least one lies wholly
    on the other side of it, which refutes that `better` beats them all; else undecided. Every interval has
    the level that makes all of them hold together at `level` (Bonferroni). `effect`, `low` and
    `high` are signed so that above zero is better; of several, those that refute most clearly, and without a
    refutation those of the least effect.
    """
    sign = -1.0 if least else 1.0
    each = 1 - (1 - level) / len(others)
    gaps = [difference([sign * b for b in better], [sign * o for o in other], each) for other in others]
    answer = "undecided"
    if all(gap["low"] > 0 for gap in gaps):
        answer = "yes"
    elif any(gap["high"] < 0 for gap in gaps):
        answer = "no"
    decisive = min(gaps, key=lambda gap: gap["high"] if answer == "no" else gap["mean"])
    limits = {key: decisive[key] for key in ("low", "high", "n")}
    return {"answer": answer, "effect": decisive["mean"], **limits}


def at_an_end(chosen: str | float, grid: Iterable[str | float]) -> bool:
    """Return whether a value is the least or largest number of the grid that it was chosen from."""
    try:
        numbers = {float(value) for value in grid}
        return len(numbers) > 1 and float(chosen) in (min(numbers), max(numbers))
    except ValueError:
        return False


def best_temperature(nats: Callable[[float], float]) -> float:
    """Return the temperature with the fewest `nats` per token, between exp(-WIDEST) and exp(WIDEST)."""
    result = minimize_scalar(
        lambda t: nats(math.exp(t)), bounds=(-WIDEST, WIDEST), method="bounded", options={"xatol": 1e-9}
    )
    return math.exp(result.x)
