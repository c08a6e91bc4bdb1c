"""Differences of win rates, and what lengths have to do with them. Pure functions.

A score is what a verdict counts for B: 1 when B's answer is better, 0 when A's is, 1/2 for a tie. The win
rate of B is the mean score, AlpacaEval's (n_2 + n_0 / 2) / n. The unit is the question, not the verdict:
pairs that share a question stay together.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.stats import Interval, bounded_mean

DRAWS = 5_000  # of signs
BATCH = 500  # draws at a time
FOLDS = 5  # of AlpacaEval's cross-validation
LEAST = 2 * FOLDS  # verdicts that a length-controlled win rate needs
NEXT_TO_NOTHING = 1e-12  # a weight


def paired(
    first: Sequence[float], second: Sequence[float], questions: Sequence[str], seed: int = 0
) -> tuple[float, Interval, float]:
    """Return difference second - first of two models' scores [n] on the same pairs: (mean, 95 % interval, p).

    p: two-sided; if the models do not differ, the sign of each question's difference is a coin's.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    mean, interval = bounded_mean(differences.tolist(), questions, -1.0, 1.0)
    _, cluster_index = np.unique(np.asarray(questions), return_inverse=True)
    sums = np.bincount(cluster_index, weights=differences)
    sums = sums[sums != 0]
    rng, as_far = np.random.default_rng(seed), 0
    for _ in range(0, DRAWS, BATCH):
        signs = rng.choice([-1.0, 1.0], (BATCH, len(sums)))
        as_far += int((np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9).sum())
    return mean, interval, (as_far + 1) / (DRAWS + 1)


def length_controlled(
    scores: Sequence[float], lengths_a: Sequence[int], lengths_b: Sequence[int]
) -> float | None:
    """B's win rate as it were at equal lengths: AlpacaEval's `length_controlled_minimal` (alpaca_eval 0.6.6).

    A logistic model of the scores [n] on tanh(d / sd(d)) and a constant, d = characters of A's answer less
    those of B's; fitted with an L1 penalty chosen by cross-validation; predicted at d = 0. Instructions'
    difficulty, which the full form adds from a table of its own, is left out. None with fewer than LEAST
    scores or without any difference in length.
    """
    score = np.asarray(scores, float)
    d = np.asarray(lengths_a, float) - np.asarray(lengths_b, float)
    if len(score) < LEAST or d.std() == 0:
        return None
    features = np.stack([np.tanh(d / d.std(ddof=1)), np.ones_like(d)], axis=1)
    # A score is a probability: each pair stands there twice, won and lost, with its share as the weight.
    X, y = np.concatenate([features] * 2), np.repeat([1, 0], len(d))
    weight, pair = np.concatenate([score, 1 - score]), np.tile(np.arange(len(d)), 2)
    model = _fit(X, y, weight, _strength(X, y, weight, pair))
    return float(1 / (1 + np.exp(-model.coef_[0, 1])))


def _strength(X: np.ndarray, y: np.ndarray, weight: np.ndarray, pair: np.ndarray) -> float:
    """The inverse strength of the penalty with the least log loss on pairs left out."""
    from sklearn.model_selection import GroupKFold

    grid = np.logspace(-4, 4, 10)
    losses = np.zeros(len(grid))
    for train, test in GroupKFold(FOLDS).split(X, y, pair):
        for i, C in enumerate(grid):
            p = _fit(X[train], y[train], weight[train], C).predict_proba(X[test])[:, 1].clip(1e-15, 1 - 1e-15)
            share = np.where(y[test] == 1, weight[test], 1 - weight[test])
            losses[i] -= (share * np.log(p) + (1 - share) * np.log(1 - p)).mean()
    return float(grid[losses.argmin()])


def _fit(X: np.ndarray, y: np.ndarray, weight: np.ndarray, C: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    if not all(
        weight[y == won].any() for won in (0, 1)
    ):  # of such a class liblinear complains on the terminal
        weight = np.maximum(weight, NEXT_TO_NOTHING)
    model = LogisticRegression(C=C, l1_ratio=1.0, solver="liblinear", fit_intercept=False, random_state=123)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ConvergenceWarning of a fold
        return model.fit(X, y, sample_weight=weight)
