"""Judgements made up for tests."""

from __future__ import annotations

from collections.abc import Sequence

from eval.judging.pairs import Judged


def judged_scores(scores: Sequence[float]) -> Judged:
    """Pairs of one question each, with these scores for B."""
    outcomes = {0.0: "a", 0.5: "tie", 1.0: "b"}
    rows = [
        {"id": str(i), "question": str(i), "a": "x", "b": "y", "verdicts": [outcomes[score]], "cut": None,
         "outcome": outcomes[score], "score": score, "human": [], "replies": [], "unasked": None}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return Judged("auto-j", "me", "a", "b", 1, rows)
