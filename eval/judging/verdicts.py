"""What a judge's reply says, by the rules of the judge's own code, and what its verdicts in both orders mean.

A parser takes any text and gives a verdict on the answers in the order in which the prompt shows them, or
None: the reply is unreadable. Replies are data: they are searched and read as literals, never run.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from eval.judging.prompts import without_special

Shown = Literal["first", "second", "tie"]  # by their order in the prompt
Side = Literal["a", "b", "tie"]  # whose answer is better
Outcome = Literal["a", "b", "tie", "changed", "unreadable"]

DECISION = "final decision is "  # of Auto-J
LONGEST = 100_000  # characters of a reply that are read as a literal; a verdict of AlpacaEval has about 80
SWAPPED: dict[str, Side] = {"first": "b", "second": "a", "tie": "tie"}
STRAIGHT: dict[str, Side] = {"first": "a", "second": "b", "tie": "tie"}


def auto_j(reply: str) -> Shown | None:
    """Return what follows the last "final decision is "; extract_pariwise_result of GAIR-NLP/auto-j."""
    _, marker, decision = reply.strip().rpartition(DECISION)
    verdict = decision.strip().lower() if marker else ""
    if verdict.startswith("response 1"):
        return "first"
    if verdict.startswith("response 2"):
        return "second"
    return "tie" if verdict.startswith("tie") else None


def pandalm(reply: str) -> Shown | None:
    """The first line; parse_pandalm_response of WeOpenML/PandaLM, which makes a tie of what is unreadable."""
    line = without_special(reply).split("\n")[0]
    if line in ("1", "2"):
        return "first" if line == "1" else "second"
    return "tie" if line.lower() == "tie" else None


def alpaca_eval(reply: str) -> Shown | None:
    """The rank of model_1 in a Python list of dictionaries; ranking_parser of alpaca_eval 0.6.6."""
    if len(reply) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a literal may look odd to Python
            ranked: Any = ast.literal_eval(reply)
        rank = next(entry["rank"] for entry in [entry for entry in ranked if entry["model"] == "model_1"])
        return {1: "first", 2: "second"}.get(rank)  # type: ignore[return-value]
    except Exception:  # whatever a text can do to a parser: it is no verdict
        return None


def side(position: Shown | None, swapped: bool) -> Side | None:
    """Whose answer a verdict prefers; swapped: the prompt showed B's first."""
    return None if position is None else (SWAPPED if swapped else STRAIGHT)[position]


def outcome(sides: Sequence[Side | None]) -> Outcome:
    """Return what the verdicts in both orders, or in the only one, come to.

    `changed`: they differ, which counts as a tie; `unreadable`: one of them cannot be read.
    """
    if not sides or any(side is None for side in sides):
        return "unreadable"
    distinct = set(sides)
    return distinct.pop() if len(distinct) == 1 else "changed"  # type: ignore[return-value]


def score(result: Outcome) -> float | None:
    """Return what an outcome counts for B: 1, 0, 1/2 for a tie or a changed verdict; None for no verdict."""
    return {"a": 0.0, "b": 1.0, "tie": 0.5, "changed": 0.5, "unreadable": None}[result]
