"""The sections of the report on judged answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from emo.common.errors import UserError
from emo.common.report.document import Cell, Fold, Items, Quote, ReportSection, Row, Table, drawn, estimated
from emo.common.report.numbers import Effect, formatted, p_value, percent

from ..judging.results import Judgement, JudgementNumbers, remarks, undecided
from ..results.directory import Record
from ..results.stats import compare_scores

SIDES = {"a": "A is better", "b": "B is better", "tie": "tie", None: "unreadable"}
OUTCOMES = SIDES | {"changed": "changes with the order and counts as a tie", "unreadable": "unreadable"}
VERDICTS = {  # tone -> text in the table, text in a sentence
    "better": ("preferred", "prefers {b} to {a}"),
    "worse": ("not preferred", "prefers {a} to {b}"),
    "unclear": ("no clear difference", "prefers neither {b} nor {a}"),
    "quiet": ("no verdict", "gives no verdict on {b} and {a}"),
}
CAPTION = (
    "Per cent of questions for B, with 95 % intervals. Win rate: a tie counts half. At equal lengths: "
    "AlpacaEval's length-controlled win rate. Both orders: pairs whose verdict does not depend on which "
    "answer comes first. Pairs with an unreadable verdict are left out."
)
PAIRED = "Points between win rates against the same A, with the same judge and questions."
HUMAN = (
    "Per cent. A verdict that is unreadable or changes with the order is wrong. In brackets: with unreadable "
    "verdicts as ties. Kappa: Cohen's, between judge and majority. People: Fleiss' kappa of the human labels."
)


class PairedJudgements(TypedDict):
    """The difference between the win rates of two models, on the pairs that both judgements have."""

    first: str
    second: str
    judge: str
    n: int
    questions: str
    difference: float
    low: float
    high: float
    p: float


def compare_judgements(judgements: Sequence[Judgement], skipped: list[str]) -> list[PairedJudgements]:
    """Compare each judgement with the first by the same judge, against the same A, on the same questions.

    They are compared on the questions with readable verdicts in both and the same answer of A, if there are
    at least two.
    """
    firsts: dict[tuple[str, ...], Judgement] = {}
    pairs: list[PairedJudgements] = []
    for judgement in judgements:
        f = judgement.numbers
        judge = (f["judge"], f["by"], str(f["facts"].get("weights")))
        first = firsts.setdefault((*judge, f["a"], f["questions"]), judgement)
        try:
            a, b = ({}, {}) if first is judgement else (first.scores, judgement.scores)
        except UserError as error:
            skipped.append(str(error))
            continue
        asked = [key for key in a if key in b and a[key][0] == b[key][0]]  # ids may be row numbers
        keys = [key for key in asked if a[key][1] == b[key][1]]
        if len(keys) < len(asked):
            left_out = f"{len(asked) - len(keys)} of {len(asked)} questions"
            reason = f"{f['a']} had answered them differently"
            skipped.append(f"{f['b']} is compared with {first.numbers['b']} without {left_out}: {reason}")
        if len(keys) > 1:
            before, after = ([scores[key][2] for key in keys] for scores in (a, b))
            mean, interval, p = compare_scores(before, after, [a[key][0] for key in keys])
            pairs.append(
                {"first": first.numbers["b"], "second": f["b"], "judge": f["by"], "n": len(keys),
                 "questions": f["questions"], "difference": mean, "low": interval.low, "high": interval.high,
                 "p": p}
            )  # fmt: skip
    return pairs


def answers(judgements: Sequence[Judgement]) -> list[str]:
    """Return a sentence for each of the first four judgements."""
    sentences = []
    for f in (judgement.numbers for judgement in judgements):
        rate = f["win_rate"]
        verb = VERDICTS[_tone(f)][1].format(**f)
        reason = undecided(f)
        if reason or rate is None:
            sentences.append(f"{f['by']} {verb}{_on(f['questions'])}: {reason}.")
            continue
        size = f"{f['b']} has a win rate of {percent(rate['value'])} %"
        sentences.append(f"{f['by']} {verb}{_on(f['questions'])}: {size}.")
    return sentences[:4]


def sections(judgements: Sequence[Judgement], pairs: Sequence[PairedJudgements]) -> list[ReportSection]:
    """Return the sections with tables and with example pairs."""
    fields = [judgement.numbers for judgement in judgements]
    titles = _titles(fields)
    notes = [
        f"{title}: {f['counts'][name]:,} {text}"
        for f, title in zip(fields, titles, strict=True)
        for name, text in remarks(f)
    ]
    folds = [
        Fold(title, [block for pair in f["shown"] for block in _pair(pair)])
        for f, title in zip(fields, titles, strict=True)
    ]
    differences: list[Row] = []
    for p in pairs:
        points = estimated(p["difference"], p["low"], p["high"], "{:+.1f}", 100)
        judge = p["judge"] + _on(p["questions"])
        differences.append([p["second"], p["first"], judge, p["n"], points, p_value(p["p"])])
    head = ["Model", "Compared with", "Judge", "Pairs", "Points", "p"]
    between_models = Table(head, differences, PAIRED, 3, "Between models")
    lead = "Evenly spaced pairs of each comparison, not selected by hand."
    tables = _rates(fields), Items(notes, "Note"), between_models, _people(fields)
    return [ReportSection("Answers, judged", *tables), ReportSection("Judged pairs", lead, *folds)]


def draw_win_rates(judgements: Sequence[Judgement]) -> Table:
    """Return the win rates on one axis."""
    fields = [judgement.numbers for judgement in judgements if judgement.numbers["win_rate"]]
    rows: list[Row] = []
    for f, title in zip(fields, _titles(fields), strict=True):
        if rate := f["win_rate"]:
            effect = Effect(title, 1, 0, *(100 * rate[key] for key in ("value", "low", "high")))
            rows.append([title, *drawn(effect, "{:.1f}")])
    caption = "Win rate with its 95 % interval. A tie counts half. The dark line is no preference."
    return Table(["Comparison", "Win rate", "Per cent"], rows, caption, line=50.0)


def _tone(fields: JudgementNumbers) -> str:
    """Return the tone of the verdict on B."""
    rate = fields["win_rate"]
    if rate is None or undecided(fields):
        return "quiet"
    if rate["low"] <= 0.5 <= rate["high"]:
        return "unclear"
    return "better" if rate["low"] > 0.5 else "worse"


def _describe(fields: JudgementNumbers) -> str:
    """Return the models, the questions and the judge in a phrase."""
    return f"{fields['b']} against {fields['a']}{_on(fields['questions'])}, judged by {fields['by']}"


def _titles(fields: Sequence[JudgementNumbers]) -> list[str]:
    """Return `_describe` of each judgement, with its name if several would be equal."""
    titles = [_describe(f) for f in fields]
    named = [f"{t} ({f['name']})" if titles.count(t) > 1 else t for t, f in zip(titles, fields, strict=True)]
    return [f"{t} #{named[:i].count(t) + 1}" if named.count(t) > 1 else t for i, t in enumerate(named)]


def _on(questions: str) -> str:
    return f" on {questions}" if questions else ""


def _share(value: dict[str, float] | None) -> Cell | None:
    return estimated(value["value"], value["low"], value["high"], "{:.1f}", 100) if value else None


def _rates(fields: Sequence[JudgementNumbers]) -> Table:
    rows: list[Row] = []
    for f, title in zip(fields, _titles(fields), strict=True):
        tone = _tone(f)
        about = f"against {f['a']}{_on(f['questions'])}{title.removeprefix(_describe(f))}"
        names = [Cell(f["b"], about), Cell(VERDICTS[tone][0], undecided(f), tone=tone)]
        shares = [_share(share) for share in (f["win_rate"], f["win"], f["tie"], f["loss"])]
        lengths = f"{f['lengths']['b']:.0f} / {f['lengths']['a']:.0f}"
        controlled = percent(f["length_controlled"])
        both_orders = percent(f["consistency"])
        counts = f"{f['read']:,} of {f['pairs']:,}"
        rows.append([*names, *shares, f["by"], counts, controlled, lengths, both_orders])
    head = ["B", "Verdict", "Win rate", "Win", "Tie", "Loss", "Judge", "Pairs", "At equal lengths"]
    return Table([*head, "Characters B / A", "Both orders"], rows, CAPTION, 2)


def _people(fields: Sequence[JudgementNumbers]) -> Table:
    rows: list[Row] = []
    for f in fields:
        if (human := f["human"]) is None:
            continue
        agreement = _share(human["agreement"])
        ties = human["unreadable_as_ties"]
        if agreement and ties != human["agreement"]["value"]:
            agreement = replace(agreement, text=f"{agreement.text} ({percent(ties)})")
        kappas = [formatted(kappa, "{:.3f}") for kappa in (human["kappa"], human["kappa_of_people"])]
        rows.append([f["by"], f["judge"], human["rows"], agreement, *kappas])
    head = ["Verdicts by", "Judge", "Pairs", "Agreement", "Kappa", "People"]
    return Table(head, rows, HUMAN, 2, "Agreement with people")


def _pair(pair: Record) -> list[Quote | Fold]:
    """Return a question, both answers, and the judge's reply in each order."""
    orders = ("A first", "B first") if len(pair["verdicts"]) > 1 else ("verdict",)
    sentences = [f"{order}: {SIDES.get(v, v)}" for order, v in zip(orders, pair["verdicts"], strict=False)]
    verdict = f"{OUTCOMES.get(pair['outcome'], pair['outcome'])} ({'; '.join(sentences)})"
    texts = {"Question": pair["question"], "Answer of A": pair["a"], "Answer of B": pair["b"]}
    replies = [Quote(r["text"], title=f"Reply, {o}") for o, r in zip(orders, pair["replies"], strict=False)]
    quotes = [Quote(text, title=name) for name, text in (texts | {"Verdict": verdict}).items()]
    return [*quotes, Fold("Replies of the judge", replies)]
