"""A judgement on disk: what the verdicts come to, and every pair with its replies.

OUT/judgements/NAME.json     shares, win rates, lengths, agreement with people, five pairs
OUT/judgements/NAME.jsonl    a line per pair: question, answers, replies, verdicts, outcome
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import UserError
from eval import store
from eval.judging import agreement
from eval.judging.judged import IDENTICAL, NO_ROOM, Judged
from eval.judging.rows import Row, evenly
from eval.judging.terminal import REMARKS
from eval.judging.win_rates import length_controlled
from eval.model import clean_name
from eval.stats import Interval, bounded_mean, confusion

JUDGEMENTS = "judgements"
VERSION = 3
SHOWN = 5  # pairs in the report
SHARES = ("win", "tie", "loss")
FOUND = (*agreement.LABELS, "unreadable")


def default_title(judged: Judged) -> str:
    """Return the name of a judgement where nobody says otherwise."""
    by = judged.judge if judged.by == judged.judge else f"{judged.judge}-{Path(judged.by).name}"
    questions = f"-{judged.questions}" if judged.questions else ""
    return clean_name(f"{judged.b}-vs-{judged.a}{questions}-{by}")


def summary(judged: Judged, name: str) -> dict[str, Any]:
    """All numbers of a judgement; shares and win rate are null where not one verdict can be read."""
    rows = judged.rows
    read = [row for row in rows if row["score"] is not None]
    return {
        "version": VERSION,
        "name": name,
        "judge": judged.judge,
        "by": judged.by,
        "a": judged.a,
        "b": judged.b,
        "questions": judged.questions,
        "orders": judged.orders,
        "facts": judged.facts,
        "pairs": len(rows),
        "read": len(read),
        "counts": _counts(rows),
        **_rates(read),
        "length_controlled": length_controlled(
            [row["score"] for row in read],
            [len(row["a"]) for row in read],
            [len(row["b"]) for row in read],
        ),
        "lengths": {side: float(np.mean([len(row[side]) for row in rows])) for side in ("a", "b")},
        "consistency": _consistency(judged),
        "human": _human(rows) if rows[0]["human"] else None,
        "shown": [rows[i] for i in evenly(len(rows), SHOWN)],
    }


def _counts(rows: list[Row]) -> dict[str, int]:
    """Outcomes, and apart from them what a reader should know about the pairs."""
    outcomes = Counter(row["outcome"] for row in rows)
    unasked = Counter(row["unasked"] for row in rows)
    sides = [verdict for row in rows if row["unasked"] is None for verdict in row["verdicts"]]
    return {
        **{name: outcomes[name] for name in ("a", "b", "tie", "changed")},
        "unreadable": outcomes["unreadable"] - unasked[NO_ROOM],
        "no_room": unasked[NO_ROOM],
        "identical": unasked[IDENTICAL],
        "cut": sum(row["cut"] is not None for row in rows),
        "empty_a": sum(not row["a"].strip() for row in rows),
        "empty_b": sum(not row["b"].strip() for row in rows),
        "unreadable_replies": sum(verdict is None for verdict in sides),
        "replies_cut_off": sum(reply.get("ended") is False for row in rows for reply in row["replies"]),
    }


def _rates(read: list[Row]) -> dict[str, Any]:
    """Shares of wins, ties and losses of B and its win rate, each with its interval over questions."""
    if not read:
        return dict.fromkeys((*SHARES, "win_rate"))
    scores = np.array([row["score"] for row in read])
    columns = (scores > 0.5, scores == 0.5, scores < 0.5, scores)
    questions = [row["question"] for row in read]
    return {
        name: _share(column.tolist(), questions)
        for name, column in zip((*SHARES, "win_rate"), columns, strict=True)
    }


def _share(values: Sequence[float], questions: Sequence[str]) -> dict[str, float]:
    """Return a mean from 0 to 1 with its interval; the unit is the question."""
    value, interval = bounded_mean(values, questions)
    return {"value": value, **asdict(interval)}


def _consistency(judged: Judged) -> float | None:
    """The share of pairs whose verdict is the same in both orders; None where only one was asked."""
    judged_rows = [row for row in judged.rows if row["unasked"] is None]
    if judged.orders < 2 or not judged_rows:
        return None
    return sum(row["outcome"] in agreement.LABELS for row in judged_rows) / len(judged_rows)


def _human(rows: list[Row]) -> dict[str, Any]:
    """Return how the verdicts agree with the people's labels.

    agreement: a verdict that is unreadable, or changes with the order, is wrong, as Auto-J counts.
    unreadable_as_ties: the same with what is unreadable made a tie, as PandaLM counts. kappa: of readable
    verdicts, changed ones as ties.
    """
    gold = [agreement.majority(row["human"]) for row in rows]
    outcomes = [row["outcome"] for row in rows]
    right = [float(g == f) for g, f in zip(gold, outcomes, strict=True)]
    settled = ["tie" if outcome == "changed" else outcome for outcome in outcomes]
    both = [(g, f) for g, f in zip(gold, settled, strict=True) if f != "unreadable"]
    several = len(rows[0]["human"]) > 1
    return {
        "rows": len(rows),
        "raters": len(rows[0]["human"]),
        "no_majority": sum(len(row["human"]) > 2 and len(set(row["human"])) > 2 for row in rows),
        "agreement": _share(right, [row["question"] for row in rows]),
        "unreadable_as_ties": agreement.accuracy(gold, ["tie" if f == "unreadable" else f for f in outcomes]),
        "kappa": agreement.cohen(*zip(*both, strict=True)) if both else None,
        "kappa_of_people": agreement.fleiss([row["human"] for row in rows]) if several else None,
        "labels": list(FOUND),
        "confusion": confusion(gold, settled, FOUND)[:3],
    }


def write(judged: Judged, name: str, out: Path) -> dict[str, Any]:
    """Write both files of a judgement; its numbers."""
    numbers = summary(judged, name)
    directory = out / JUDGEMENTS
    lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in judged.rows)
    numbers["rows_digest"] = store.digest(lines)
    store.replace(directory / f"{name}.jsonl", lines)
    store.replace(directory / f"{name}.json", store.dump(numbers))
    return numbers


@dataclass(frozen=True)
class Judgement:
    """A judgement that was read: its numbers, and where its pairs are."""

    numbers: dict[str, Any]
    path: Path

    @property
    def name(self) -> str:
        return str(self.numbers["name"])

    def interval(self, share: str) -> Interval:
        """The interval of a share or of the win rate, of which there must be one."""
        return Interval(self.numbers[share]["low"], self.found[share]["high"])

    @cached_property
    def scores(self) -> dict[str, tuple[str, float]]:
        """Key of a pair -> (its question, B's score), of readable verdicts. UserError when it is damaged."""
        file = self.path.with_suffix(".jsonl")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({type(error).__name__}); judge again") from None
        if store.digest(text) != self.numbers["rows_digest"]:
            raise UserError(f"{file} is not what was judged; judge again")
        rows = [json.loads(line) for line in text.split("\n") if line]
        return {row["id"]: (row["question"], row["score"]) for row in rows if row["score"] is not None}


class Form(BaseModel):
    """The contents that a judgement's file may have; whoever shows it relies on that."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Share(Form):
    value: float
    low: float
    high: float


class People(Form):
    rows: int
    raters: int
    agreement: Share
    unreadable_as_ties: float
    kappa: float | None
    kappa_of_people: float | None


class Said(Form):
    text: str


class Shown(Form):
    question: str
    a: str
    b: str
    verdicts: list[str | None]
    outcome: str
    replies: list[Said]


class Numbers(Form):
    """The numbers that `summary` finds and a report shows."""

    name: str
    judge: str
    by: str
    a: str
    b: str
    questions: str
    orders: int
    facts: dict[str, Any]
    pairs: int
    read: int
    counts: dict[str, int]
    win: Share | None
    tie: Share | None
    loss: Share | None
    win_rate: Share | None
    length_controlled: float | None
    lengths: dict[str, float]
    consistency: float | None
    human: People | None
    shown: list[Shown]
    rows_digest: str


def read_judgements(outs: Sequence[Path], say: Callable[[str], None]) -> list[Judgement]:
    """All judgements under some results directories. say: told which files are skipped, and why."""
    judgements = []
    for out in outs:
        for path in sorted((out / JUDGEMENTS).glob("*.json")):
            value = store.read_json(path)
            if not isinstance(value, dict) or value.get("version") != VERSION:
                say(f"skipped {path}: damaged, or a judgement of another version; judge again")
            elif not _is_whole(value):
                say(f"skipped {path}: damaged; judge again")
            else:
                judgements.append(Judgement(value, path))
    return judgements


def _is_whole(value: dict[str, Any]) -> bool:
    try:
        numbers = Numbers.model_validate(value)
    except ValidationError:
        return False
    shares = (numbers.win, numbers.tie, numbers.loss, numbers.win_rate)
    return (
        all((share is None) == (not numbers.read) for share in shares)
        and numbers.counts.keys() >= REMARKS.keys()
        and numbers.lengths.keys() >= {"a", "b"}
    )
