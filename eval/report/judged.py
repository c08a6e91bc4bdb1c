"""The report's part on judged answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from common.report.document import Cell, Fold, Items, Quote, Row, Section, Table
from common.report.figure import Dot, Dots, Figure
from common.report.numbers import DASH, between, formatted, p_value, percent, points
from eval.judging.results import Judgement, paired, remarks

SIDES = {"a": "A is better", "b": "B is better", "tie": "tie", None: "unreadable"}
OUTCOMES = SIDES | {"changed": "changes with the order: a tie", "unreadable": "unreadable"}
CAPTION = (
    "Per cent of questions, from the side of B, with 95 % intervals. Win rate: a tie counts half. At equal "
    "lengths: as if both had written as much (AlpacaEval's length-controlled win rate). Both orders: pairs "
    "whose verdict does not depend on which answer comes first. Pairs with an unreadable verdict are left "
    "out."
)
PAIRED = "Points between win rates against the same A, by the same judge on the same questions."
HUMAN = (
    "Per cent; a verdict that is unreadable or changes with the order is wrong. In brackets: unreadable ones "
    "as ties. Kappa: Cohen's, of judge and majority. People: Fleiss', among themselves."
)


@dataclass(frozen=True)
class Pairing:
    """Two judgements on the same pairs: how much higher the second's win rate is."""

    first: str
    second: str
    judge: str
    questions: str
    n: int
    difference: float
    low: float
    high: float
    p: float


def pairings(judgements: Sequence[Judgement], skipped: list[str]) -> list[Pairing]:
    """Return each judgement beside the first by the same judge, against the same A, on the same questions."""
    groups: dict[tuple[str, ...], list[Judgement]] = {}
    for judgement in judgements:
        same = tuple(judgement.numbers[name] for name in ("judge", "by", "a", "questions"))
        groups.setdefault(same, []).append(judgement)
    pairs: list[Pairing] = []
    for first, *others in groups.values():
        for other in others:
            try:
                pairs += _pairing(first, other)
            except UserError as error:
                skipped.append(str(error))
    return pairs


def _pairing(first: Judgement, second: Judgement) -> Iterable[Pairing]:
    """Yield the comparison on the questions with a readable verdict in both, if these are two or more."""
    a, b = first.scores, second.scores
    keys = [key for key in a if key in b and a[key][0] == b[key][0]]  # ids may be row numbers
    if len(keys) > 1:
        questions = [a[key][0] for key in keys]
        mean, interval, p = paired([a[k][1] for k in keys], [b[k][1] for k in keys], questions)
        names = first.numbers["b"], second.numbers["b"], first.numbers["by"], first.numbers["questions"]
        yield Pairing(*names, len(keys), mean, interval.low, interval.high, p)


def answers(judgements: Sequence[Judgement]) -> list[str]:
    """Return a sentence for each of the first judgements that have a win rate."""
    sentences = []
    for f in (judgement.numbers for judgement in judgements if judgement.numbers["win_rate"]):
        rate = f["win_rate"]
        numbers = (
            f"{percent(rate['value'])} % (95 % interval {between(rate['low'], rate['high'], scale=100)})"
        )
        verb = {"better": "prefers {b} to {a}", "worse": "prefers {a} to {b}"}.get(
            _tone(rate), "prefers neither {b} nor {a}"
        )
        clause = f"{f['by']} {verb.format(**f)}{_on(f['questions'])}"
        sentences.append(f"{clause}: {f['b']} has a win rate of {numbers}.")
    return sentences[:4]


def _tone(rate: dict[str, float] | None) -> str:
    """Return the verdict on B."""
    sure = 0 if rate is None else (rate["low"] > 0.5) - (rate["high"] < 0.5)
    return {1: "better", -1: "worse", 0: "unclear"}[sure]


def sections(judgements: Sequence[Judgement], pairs: Sequence[Pairing]) -> list[Section]:
    """Return the tables, and the pairs that are shown."""
    fields = [judgement.numbers for judgement in judgements]
    notes = [f"{_judged(f)}: {f['counts'][name]:,} {text}" for f in fields for name, text in remarks(f)]
    folds = [Fold(_judged(f), [block for pair in f["shown"] for block in _pair(pair)]) for f in fields]
    lead = "Evenly spaced pairs of each comparison, none picked, as they are."
    tables = _rates(fields), Items(notes, "Note"), _paired(pairs), _people(fields)
    return [Section("Answers, judged", *tables), Section("Judged pairs", lead, *folds)]


def picture(judgements: Sequence[Judgement]) -> Figure:
    """Return the win rates."""
    rows = [
        Dot(_judged(f), i, *(100 * f["win_rate"][key] for key in ("value", "low", "high")))
        for i, f in enumerate(judgement.numbers for judgement in judgements)
        if f["win_rate"]
    ]
    caption = "Win rate in per cent with its 95 % interval; a tie counts half. Dotted line: no preference."
    return Figure("Win rates", [Dots("Win rate", rows, 50.0)], caption)


def _judged(fields: dict[str, Any]) -> str:
    """Return B against A, on which questions, and by whom."""
    return f"{fields['b']} against {fields['a']}{_on(fields['questions'])}, judged by {fields['by']}"


def _on(questions: str) -> str:
    return f" on {questions}" if questions else ""


def _share(value: dict[str, float] | None) -> Cell:
    if value is None:
        return Cell(DASH)
    return Cell(percent(value["value"]), between(value["low"], value["high"], scale=100))


def _rates(fields: Sequence[dict[str, Any]]) -> Table:
    rows: list[Row] = []
    for f in fields:
        tone = _tone(f["win_rate"])
        verdict = {"better": "preferred", "worse": "not preferred", "unclear": "no clear difference"}[tone]
        against = f"against {f['a']}{_on(f['questions'])}"
        shares = [_share(f[name]) for name in ("win_rate", "win", "tie", "loss")]
        names = [Cell(f["b"], against), Cell(verdict, tone=tone)]
        judge = [f["by"], f"{f['read']:,} of {f['pairs']:,}"]
        lengths = f"{f['lengths']['b']:.0f} / {f['lengths']['a']:.0f}"
        facts = [percent(f["length_controlled"]), lengths, percent(f["consistency"])]
        rows.append([*names, *shares, *judge, *facts])
    head = "B | Verdict | Win rate | Win | Tie | Loss | Judge | Pairs | At equal lengths | Characters B / A"
    return Table(f"{head} | Both orders", rows, CAPTION, 2)


def _paired(pairs: Sequence[Pairing]) -> Table:
    rows: list[Row] = [
        [p.second, p.first, p.judge + _on(p.questions), f"{p.n:,}",
         Cell(points(p.difference), between(p.low, p.high, "{:+.1f}", 100)), p_value(p.p)]
        for p in pairs
    ]  # fmt: skip
    head = ["Model", "Compared with", "Judge", "Pairs", "Points", "p"]
    return Table(head, rows, PAIRED, 3, "Between models")


def _people(fields: Sequence[dict[str, Any]]) -> Table:
    rows: list[Row] = []
    for f in fields:
        if human := f.get("human"):
            agreement, ties = _share(human["agreement"]), human["unreadable_as_ties"]
            if ties != human["agreement"]["value"]:
                agreement = replace(agreement, text=f"{agreement.text} ({percent(ties)})")
            kappas = [formatted(human[key], "{:.3f}") for key in ("kappa", "kappa_of_people")]
            rows.append([f["by"], f["judge"], f"{human['rows']:,}", agreement, *kappas])
    head = ["Verdicts by", "Judge", "Pairs", "Agreement", "Kappa", "People"]
    return Table(head, rows, HUMAN, 2, "Agreement with people")


def _pair(pair: dict[str, Any]) -> list[Quote | Fold]:
    """Return a question, both answers, and what the judge said in each order."""
    orders = ("A first", "B first") if len(pair["verdicts"]) > 1 else ("verdict",)
    sentences = [f"{order}: {SIDES.get(v, v)}" for order, v in zip(orders, pair["verdicts"], strict=False)]
    verdict = f"{OUTCOMES.get(pair['outcome'], pair['outcome'])} ({'; '.join(sentences)})"
    texts = {
        "Question": pair["question"],
        "Answer of A": pair["a"],
        "Answer of B": pair["b"],
        "Verdict": verdict,
    }
    replies = [Quote(r["text"], title=f"Reply, {o}") for o, r in zip(orders, pair["replies"], strict=False)]
    return [*(Quote(text, title=name) for name, text in texts.items()), Fold("Replies of the judge", replies)]
