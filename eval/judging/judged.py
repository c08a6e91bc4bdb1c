"""Judged pairs: replies become verdicts, outcomes and scores, whoever gave them. One form for all sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.judging.judges import Judge
from eval.judging.pairs import Pair, Pairs
from eval.judging.rows import Row
from eval.judging.verdicts import Side, outcome, score, side

IDENTICAL, NO_ROOM = "identical", "no_room"  # why a pair was not asked


@dataclass(frozen=True)
class Judged:
    """All pairs with a judge's verdicts. by: who gave them; orders: 2 where pairs were asked both ways round.

    facts: how it was done, for the record; questions: the set that they are of, "" where nothing says so.
    """

    judge: str
    by: str
    a: str
    b: str
    orders: int
    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    questions: str = ""


def of_replies(judge: Judge, by: str, pairs: Pairs, replies: Sequence[Row], facts: dict[str, Any]) -> Judged:
    """Pairs with the replies to their prompts.

    replies: one per pair, {"replies": [{"text", ...}, {"text", ...}]}, A's answer first and B's first; with
    "unasked" instead where there was nothing to ask, and "cut" where both answers were cut.
    """
    rows = []
    for pair, reply in zip(pairs.rows, replies, strict=True):
        sides = [side(judge.verdict(r["text"]), bool(i)) for i, r in enumerate(reply["replies"])]
        if reply.get("unasked") == IDENTICAL:
            sides = ["tie"] * 2  # as AlpacaEval's annotator has it
        rows.append(row_of(pair, sides) | {key: reply[key] for key in ("replies", "unasked", "cut")})
    return Judged(judge.name, by, pairs.a, pairs.b, 2, rows, facts, pairs.questions)


def row_of(pair: Pair, sides: Sequence[Side | None], value: float | None = None) -> Row:
    """A judged pair. value: its score where the verdict is a number between the two."""
    result = outcome(sides)
    return {
        "id": pair.key,
        "question": pair.question.text,
        "a": pair.a,
        "b": pair.b,
        "verdicts": list(sides),
        "outcome": result,
        "score": score(result) if value is None else value,
        "human": list(pair.human),
        "replies": [],
        "unasked": None,
        "cut": None,
    }
