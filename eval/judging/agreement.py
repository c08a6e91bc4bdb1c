"""How a judge agrees with people, people with each other, and a judge with itself. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

LABELS = ("a", "b", "tie")


def majority(labels: Sequence[str]) -> str:
    """The label that most annotators gave; of several, the one given first, as PandaLM has it."""
    counts = Counter(labels)
    return max(counts, key=lambda label: counts[label])  # Counter keeps the order in which they came


def accuracy(gold: Sequence[str], predicted: Sequence[str | None]) -> float:
    """The share of labels [n] that were found; what is unreadable (None) is wrong."""
    return float(np.mean([g == f for g, f in zip(gold, predicted, strict=True)]))


def cohen(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Cohen's kappa (1960): (p_o - p_e) / (1 - p_e), p_e from each rater's own shares. None where p_e = 1."""
    n = len(first)
    shares = [
        {label: list(labels).count(label) / n for label in {*first, *second}} for labels in (first, second)
    ]
    expected = sum(shares[0][label] * shares[1][label] for label in shares[0])
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    return None if expected > 1 - 1e-12 else (observed - expected) / (1 - expected)


def fleiss(ratings: Sequence[Sequence[str]]) -> float | None:
    """Fleiss' kappa (1971) of rows [n], each rated by as many raters, two at least. None where p_e = 1."""
    raters = len(ratings[0])
    labels = sorted({label for row in ratings for label in row})
    counts = np.array([[list(row).count(label) for label in labels] for row in ratings], float)
    agreeing = (counts * (counts - 1)).sum(axis=1) / (raters * (raters - 1))
    expected = float(((counts.sum(axis=0) / counts.sum()) ** 2).sum())
    return None if expected > 1 - 1e-12 else float((agreeing.mean() - expected) / (1 - expected))
