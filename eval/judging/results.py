"""The results of a judgement, on disk and in the terminal.

OUT/judgements/NAME.json     shares, win rates, lengths, agreement with human labels, five pairs
OUT/judgements/NAME.jsonl    a line per pair: question, answers, replies, verdicts, outcome

A verdict's score for B is 1 if B's answer is better, 0 if A's is, and 1/2 for a tie. B's win rate is the mean
score, as AlpacaEval's (n_2 + n_0 / 2) / n. The unit of intervals is the question, so pairs with the same
question stay together.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from emo.common.errors import UserError

from ..models.model import clean_name
from ..results import store
from ..results.directory import Record, Say
from ..results.rows import evenly_spaced
from ..results.stats import bounded_mean, confusion
from .judging import IDENTICAL, NO_ROOM
from .pairs import Judged

JUDGEMENTS = "judgements"
VERSION = 4
IN_REPORT = 5  # pairs
LABELS = ("a", "b", "tie")
VERDICTS = (*LABELS, "unreadable")
# Counts -> what is reported about them.
REMARKS = {
    "changed": "verdicts change with the order and count as ties",
    "unreadable": "pairs have an unreadable verdict and are left out",
    "left_out": "pairs were left out because an answer was cut off (--include_cut_off)",
    "cut_off_a": "answers of A were cut off at the token limit",
    "cut_off_b": "answers of B were cut off at the token limit",
    "replies_cut_off": "replies were cut off before their end (--max_new_tokens)",
    "identical": "pairs have identical answers and count as ties without being judged",
    "cut": "pairs did not fit into the judge's context, so both answers were cut to the same length",
    "no_room": "pairs do not fit even without their answers and are left out",
    "empty_a": "answers of A are empty",
    "empty_b": "answers of B are empty",
}


class Agreement(TypedDict):
    """The agreement of verdicts with human labels. kappa: of readable verdicts, with changed ones as ties."""

    rows: int
    raters: int
    no_majority: int
    agreement: dict[str, float]  # a verdict that is unreadable or changes with the order is wrong (Auto-J)
    unreadable_as_ties: float  # the same with unreadable verdicts as ties, as in PandaLM
    kappa: float | None
    kappa_of_people: float | None
    labels: list[str]
    confusion: list[list[int]]


class JudgementNumbers(TypedDict):
    """All numbers of a judgement. Shares and win rate are null if no verdict is readable."""

    version: int
    name: str
    judge: str
    by: str
    a: str
    b: str
    questions: str
    orders: int
    facts: Mapping[str, Any]
    pairs: int
    read: int
    counts: dict[str, int]
    win: dict[str, float] | None
    tie: dict[str, float] | None
    loss: dict[str, float] | None
    win_rate: dict[str, float] | None
    length_controlled: float | None
    lengths: dict[str, float]
    consistency: float | None  # share of pairs whose verdict is the same in both orders
    decided: int
    human: Agreement | None
    shown: list[Record]
    rows_digest: NotRequired[str]  # of the file of pairs


FOLDS = 5  # of AlpacaEval's cross-validation
MIN_SCORES = 2 * FOLDS  # for a length-controlled win rate
TINY_WEIGHT = 1e-12


def majority_label(labels: Sequence[str]) -> str:
    """Return the label that most annotators gave, and the first of several, as PandaLM does."""
    return Counter(labels).most_common(1)[0][0]


def cohen(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Return Cohen's kappa (1960) of two raters, or None if chance explains all agreement (p_e = 1)."""
    from sklearn.metrics import cohen_kappa_score

    return None if len({*first, *second}) == 1 else float(cohen_kappa_score(first, second))


def fleiss(ratings: Sequence[Sequence[str]]) -> float | None:
    """Return Fleiss' kappa (1971) of rows [n] with the same number of raters >= 2, or None for p_e = 1."""
    raters = len(ratings[0])
    labels = sorted({label for row in ratings for label in row})
    counts = np.array([[list(row).count(label) for label in labels] for row in ratings], float)
    agreeing = (counts * (counts - 1)).sum(axis=1) / (raters * (raters - 1))
    expected = float(((counts.sum(axis=0) / counts.sum()) ** 2).sum())
    return None if expected > 1 - 1e-12 else float((agreeing.mean() - expected) / (1 - expected))


def length_controlled(
    scores: Sequence[float], lengths_a: Sequence[int], lengths_b: Sequence[int]
) -> float | None:
    """Return B's win rate at equal lengths: AlpacaEval's `length_controlled_minimal` (alpaca_eval 0.6.6).

    This is the prediction at d = 0 of a logistic model of the scores [n] on tanh(d / sd(d)) and a constant,
    where d is the number of characters of A's answer minus B's. Cross-validation chooses the strength of its
    L1 penalty. The full form also uses a table of instruction difficulties. Returns None with fewer than
    MIN_SCORES scores, or if all lengths are equal.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold

    score = np.asarray(scores, float)
    d = np.asarray(lengths_a, float) - np.asarray(lengths_b, float)
    if len(score) < MIN_SCORES or d.std() == 0:
        return None
    features = np.stack([np.tanh(d / d.std(ddof=1)), np.ones_like(d)], axis=1)
    # A score is a probability, so each pair occurs twice (won and lost) with weights that sum to 1.
    X = np.concatenate([features] * 2)
    y = np.repeat([1, 0], len(d))
    weight = np.concatenate([score, 1 - score])
    pair = np.tile(np.arange(len(d)), 2)

    def fit(rows: np.ndarray, C: float) -> Any:
        weights = weight[rows]
        if not all(weights[y[rows] == won].any() for won in (0, 1)):  # liblinear would print a warning
            weights = np.maximum(weights, TINY_WEIGHT)
        model = LogisticRegression(
            C=C, l1_ratio=1.0, solver="liblinear", fit_intercept=False, random_state=123
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ConvergenceWarning of a fold
            return model.fit(X[rows], y[rows], sample_weight=weights)

    grid = np.logspace(-4, 4, 10)  # inverse strengths of the penalty
    losses = np.zeros(len(grid))  # on the pairs left out
    for train, test in GroupKFold(FOLDS).split(X, y, pair):
        for i, C in enumerate(grid):
            p = fit(train, C).predict_proba(X[test])[:, 1].clip(1e-15, 1 - 1e-15)
            share = np.where(y[test] == 1, weight[test], 1 - weight[test])
            losses[i] -= (share * np.log(p) + (1 - share) * np.log(1 - p)).mean()
    model = fit(np.arange(len(y)), float(grid[losses.argmin()]))
    return float(1 / (1 + np.exp(-model.coef_[0, 1])))


def summarise_judgement(judged: Judged, name: str) -> JudgementNumbers:
    """Return all numbers of a judgement."""
    rows = judged.rows
    read = [row for row in rows if row["score"] is not None]
    compared = [row for row in rows if row["unasked"] is None]
    scores = [row["score"] for row in read]
    questions = [row["question"] for row in read]
    columns = [[s > 0.5 for s in scores], [s == 0.5 for s in scores], [s < 0.5 for s in scores], scores]
    win, tie, loss, rate = (_share(column, questions) if read else None for column in columns)
    decided = sum(row["outcome"] in LABELS for row in compared)  # the same in both orders
    outcomes, unasked = (Counter(row[key] for row in rows) for key in ("outcome", "unasked"))
    counts = {key: outcomes[key] for key in ("a", "b", "tie", "changed")} | {
        "unreadable": outcomes["unreadable"] - unasked[NO_ROOM],
        "no_room": unasked[NO_ROOM],
        "identical": unasked[IDENTICAL],
        "cut": sum(row["cut"] is not None for row in rows),
        "left_out": judged.facts.get("left_out", 0),
        **{f"cut_off_{side}": sum(side in row["cut_off"] for row in rows) for side in "ab"},
        "empty_a": sum(not row["a"].strip() for row in rows),
        "empty_b": sum(not row["b"].strip() for row in rows),
        "unreadable_replies": sum(verdict is None for row in compared for verdict in row["verdicts"]),
        "replies_cut_off": sum(r.get("ended") is False for row in rows for r in row["replies"]),
    }
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
        "counts": counts,
        "win": win,
        "tie": tie,
        "loss": loss,
        "win_rate": rate,
        "length_controlled": length_controlled(scores, *([len(row[x]) for row in read] for x in "ab")),
        "lengths": {x: float(np.mean([len(row[x]) for row in rows])) for x in "ab"},
        "consistency": decided / len(compared) if judged.orders == 2 and compared else None,
        "decided": decided if compared else len(read),
        "human": _human(rows) if rows[0]["human"] else None,
        "shown": evenly_spaced(rows, IN_REPORT),
    }


def _share(values: Sequence[float], questions: Sequence[str]) -> dict[str, float]:
    """Return a mean from 0 to 1 with its interval over questions."""
    value, interval = bounded_mean(values, questions)
    return {"value": value, **asdict(interval)}


def _human(rows: list[Record]) -> Agreement:
    people = [row["human"] for row in rows]
    outcomes = [row["outcome"] for row in rows]
    gold = [majority_label(labels) for labels in people]
    right = [float(g == f) for g, f in zip(gold, outcomes, strict=True)]
    as_ties = [g == ("tie" if f == "unreadable" else f) for g, f in zip(gold, outcomes, strict=True)]
    settled = ["tie" if outcome == "changed" else outcome for outcome in outcomes]
    both = [(g, f) for g, f in zip(gold, settled, strict=True) if f != "unreadable"]
    return {
        "rows": len(rows),
        "raters": len(people[0]),
        "no_majority": sum(len(labels) > 2 and len(set(labels)) > 2 for labels in people),
        "agreement": _share(right, [row["question"] for row in rows]),
        "unreadable_as_ties": float(np.mean(as_ties)),
        "kappa": cohen(*zip(*both, strict=True)) if both else None,
        "kappa_of_people": fleiss(people) if len(people[0]) > 1 else None,
        "labels": list(VERDICTS),
        "confusion": confusion(gold, settled, VERDICTS)[:3],
    }


def describe_judgement(numbers: JudgementNumbers) -> Iterator[str]:
    """Yield the numbers of `summarise_judgement` as sentences, the most important first."""

    def percent(share: dict[str, float], digits: int = 1) -> str:
        return f"{100 * share['value']:.{digits}f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"

    parties = f"{numbers['b']} against {numbers['a']}, judged by {numbers['by']} ({numbers['judge']})"
    if reason := undecided(numbers):
        yield f"{parties}: no verdict: {reason}"
        parties = "  their scores"
    if rate := numbers["win_rate"]:
        shares = {"win": numbers["win"], "tie": numbers["tie"], "loss": numbers["loss"]}
        yield f"{parties}: {', '.join(f'{name} {percent(share)}' for name, share in shares.items() if share)}"
        lengths = numbers["lengths"]
        controlled = numbers["length_controlled"]
        at_equal = "" if controlled is None else f"; at equal lengths {100 * controlled:.2f}"
        yield (
            f"  win rate {percent(rate, 2)} on {numbers['read']} of {numbers['pairs']} "
            f"pairs{at_equal}; characters {lengths['b']:.0f} against {lengths['a']:.0f}"
        )
    yield from (f"  {numbers['counts'][name]} {text}" for name, text in remarks(numbers))
    if numbers["consistency"] is not None:
        yield f"  the same verdict in both orders: {100 * numbers['consistency']:.2f} %"
    if human := numbers["human"]:
        text = f"  agreement with {human['raters']} human labels a pair: {percent(human['agreement'])}"
        if human["unreadable_as_ties"] != human["agreement"]["value"]:
            text += f"; with unreadable verdicts as ties {100 * human['unreadable_as_ties']:.1f}"
        text += "" if human["kappa"] is None else f"; Cohen's kappa {human['kappa']:.3f}"
        people = human["kappa_of_people"]
        yield text + ("" if people is None else f"; Fleiss' kappa of the human labels {people:.3f}")


def undecided(numbers: JudgementNumbers) -> str:
    """Return why the verdicts cannot decide which answers are better, or "".

    They cannot if at least half of the pairs were left out, if at most half of the verdicts are readable, or
    if more than half of the readable ones depend on the order of the answers.
    """
    read = numbers["read"]
    pairs = numbers["pairs"]
    counts = numbers["counts"]
    left_out = counts["left_out"]
    if left_out >= max(1, pairs):
        return f"{left_out} of {pairs + left_out} pairs have an answer that was cut off"
    asked = pairs - counts["identical"]
    readable = read - counts["identical"]
    if asked and 2 * readable <= asked:
        return f"{readable} of {asked} verdicts are readable"
    if 2 * counts["changed"] > readable:
        return f"{counts['changed']} of {readable} verdicts change with the order of the answers"
    return ""


def remarks(numbers: JudgementNumbers) -> list[tuple[str, str]]:
    """Return the names and texts of the counts that are not zero."""
    return [(name, text) for name, text in REMARKS.items() if numbers["counts"][name]]


def default_title(judged: Judged) -> str:
    """Return the default name of a judgement."""
    by = judged.judge if judged.by == judged.judge else f"{judged.judge}-{Path(judged.by).name}"
    questions = f"-{judged.questions}" if judged.questions else ""
    return clean_name(f"{judged.b}-vs-{judged.a}{questions}-{by}")


def write_judgement(judged: Judged, name: str, out: Path) -> JudgementNumbers:
    """Write both files of a judgement, and return its numbers."""
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in judged.rows)
    numbers = summarise_judgement(judged, name)
    numbers["rows_digest"] = store.digest_json(text)
    store.replace(out / JUDGEMENTS / f"{name}.jsonl", text)
    store.replace(out / JUDGEMENTS / f"{name}.json", store.dump(numbers))
    return numbers


@dataclass(frozen=True)
class Judgement:
    """A judgement from a file: its numbers, and the path of its pairs."""

    numbers: JudgementNumbers
    path: Path

    @cached_property
    def scores(self) -> dict[str, tuple[str, str, float]]:
        """Key of each pair -> its question, A's answer and B's score, for readable verdicts."""
        file = self.path.with_suffix(".jsonl")
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if store.digest_json(text) != self.numbers["rows_digest"]:
            raise UserError(f"{file} was changed. Judge again.", code="incomplete-results")
        rows = [json.loads(line) for line in text.split("\n") if line]
        readable = (row for row in rows if row["score"] is not None)
        return {row["id"]: (row["question"], row["a"], row["score"]) for row in readable}


def read_judgements(outs: Sequence[Path], say: Say) -> list[Judgement]:
    """Return all judgements under some results directories. say: receives a line per skipped file."""
    judgements = []
    for path in (path for out in outs for path in sorted((out / JUDGEMENTS).glob("*.json"))):
        value: Any = store.read_json_or_none(path)
        valid = isinstance(value, dict) and value.get("version") == VERSION
        if valid:
            judgements.append(Judgement(value, path))
        else:
            say(f"skipped {path}: damaged, or a judgement of another version. Judge again.")
    return judgements
