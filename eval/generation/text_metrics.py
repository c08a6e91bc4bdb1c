"""Measures of texts as texts: overlap with a reference, variety, repetition, length.

Words are what white space separates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.errors import UserError

ROUGE = ("rouge1", "rougeL")


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """The n-grams of a text's words, in order, repeated ones repeatedly."""
    words = text.split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(texts: Sequence[str], n: int) -> float:
    """Different n-grams of all texts together by the number of n-grams; 0 when there are none.

    It falls with the amount of text: compare equal numbers of texts of equal length only.
    """
    counts = Counter(gram for text in texts for gram in ngrams(text, n))
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int) -> float | None:
    """Return the share of a text's n-grams that it has had before; None where it has no n-gram."""
    grams = ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def rouge_scorer() -> Any:
    """The scorer of the package rouge-score. Raises UserError where it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise UserError("ROUGE needs the package rouge-score: pip install rouge-score") from None
    return RougeScorer(list(ROUGE))


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return F-measures of ROUGE-1 and ROUGE-L of every pair, as rouge-score computes them; from 0 to 1."""
    scorer = rouge_scorer()
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [float(score[name].fmeasure) for score in scores] for name in ROUGE}
