"""The answers of a sweep or of the whole evidence as a document, with the numbers of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.report.document import Block, Cell, Document, Items, Section, Table
from common.report.figure import Dot, Dots, Figure
from common.report.numbers import DASH, between, shown
from common.untrusted import number

ANSWERS = {"yes": ("Yes", "better"), "no": ("No", "worse"), "undecided": ("Undecided", "unclear")}
# What the numbers of a row mean, by name; without one the name itself is shown.
MEANING = {
    "validation_nll": "dev nats",
    "test_nats": "test nats",
    "js": "JS",
    "kl_pq": "KL(P, Q)",
    "kl_qp": "KL(Q, P)",
    "tv": "total variation",
    "tail_mass": "mass where P < 1e-4",
    "entropy": "entropy",
    "entropy_q": "entropy",
    "kl_from_tempered_truth": "KL from tempered P",
    "settled": "settled",
    "oracle_nats": "oracle's nats of its samples",
    "floor_nats": "floor",
    "temperature": "temperature",
    "tempered_js": "JS at that temperature",
    "baseline_temperature": "temperature of equal entropy",
    "gap_js": "JS minus tempered MLE",
    "gap_kl_pq": "KL(P, Q) minus tempered MLE",
    "gap_kl_qp": "KL(Q, P) minus tempered MLE",
    "gap_tail_mass": "tail minus tempered MLE",
    "forward_ce": "forward CE",
    "reverse_ce": "reverse CE",
    "rouge_l": "ROUGE-L",
    "distinct_2": "distinct-2",
    "repetition_4": "repetition-4",
}
PAIRED = (
    "Means over repetitions with 95 % intervals; an asterisk: differs from the baseline (paired, Holm, 0.05)."
)
SETTLED = (
    "Where training would settle with unlimited data and capacity. Temperature: at which the truth would be as certain; "
    "KL from tempered P: what that temperature does not explain; settled: share of truths with such a point."
)
ANSWERED = (
    "Better by: the least of the paired differences from what the objective is compared with; above zero is better. "
    "Yes: every interval lies above zero; no: every one lies below. Their level is such that all hold together."
)


def sweep(results: dict[str, Any]) -> Document:
    """Return the table of one experiment."""
    sections = [Section("Answers", _answers(results["verdicts"])), Section("Rows", _rows("Rows", results))]
    return Document(
        "Experiment", _sentences(results["verdicts"]), f"Code: {results['code']}.", sections, data=results
    )


def evidence(results: dict[str, Any], titles: Mapping[str, tuple[str, str]]) -> Document:
    """Return all parts. titles: title of each part, and what it is about; results as `evidence.gather` has them."""
    lacking = results["left_out"]
    parts = []
    for name, found in results["parts"].items():
        title, about = titles[name]
        blocks = _study(found) if "fixed_points" in found else _rows(title, found)
        parts.append(Section(title, [about, *([lacking[name]] if name in lacking else []), *blocks]))
    lost = [f"{titles[name][0]}: {why}" for name, why in lacking.items() if name not in results["parts"]]
    sections = [
        Section("Answers", _answers(results["verdicts"])),
        *parts,
        Section("What was left out", [Items(lost)] if lost else []),
        Section("What was cut", [Items(results["cut"])] if results["cut"] else []),
    ]
    about = f"Objectives where the truth is known, and where it is not. Code {results['code']}, {results['minutes']} minutes."
    rows = [
        Dot(f["question"], i, *(float(f[key]) for key in ("effect", "low", "high")))
        for i, f in enumerate(results["verdicts"].values())
        if all(number(f[key]) is not None for key in ("effect", "low", "high"))
    ]
    picture = Figure(
        "Answers", [Dots("Better by", rows, 0.0)], "With intervals; right of the dotted line: better."
    )
    answer = _sentences(results["verdicts"])
    return Document("The evidence", answer, about, sections, picture if rows else None, data=results)


def _sentences(verdicts: dict[str, Any]) -> list[str]:
    return [f"{f['question']} {ANSWERS[f['answer']][0]}: {effect(f)}." for f in verdicts.values()] or [
        "No question was asked."
    ]


def effect(found: dict[str, Any]) -> str:
    """Return by how much a verdict's outcome is better, with its interval."""
    interval = _interval(found)
    limits = f"interval {interval}, " if interval else ""
    return f"{_meaning(found['outcome'])} better by {shown(found['effect'], '{:.4f}')} ({limits}{found['n']} pairs)"


def _interval(found: dict[str, Any]) -> str:
    low, high = number(found["low"]), number(found["high"])
    return "" if low is None or high is None else between(low, high, "{:.4f}")


def _meaning(name: str) -> str:
    return MEANING.get(name, name)


def _answers(verdicts: dict[str, Any]) -> list[Block]:
    rows = []
    for verdict in verdicts.values():
        for part, found in {"": verdict, **verdict.get("also", {})}.items():
            word, tone = ANSWERS[found["answer"]]
            better = Cell(shown(found["effect"], "{:.4f}"), _interval(found))
            question = f"{verdict['question']} ({part})" if part else verdict["question"]
            rows.append(
                [question, Cell(word, tone=tone), better, _meaning(found["outcome"]), str(found["n"])]
            )
    return [Table(["Question", "Answer", "Better by", "Outcome", "Pairs"], rows, ANSWERED, 2)] if rows else []


def _rows(title: str, found: dict[str, Any]) -> list[Block]:
    """Return the rows of a sweep as tables of nine measures, and its questions' outcomes as a figure."""
    rows = found["rows"]
    names = list(dict.fromkeys(key for row in rows for key in row["measures"]))
    head = [*rows[0]["labels"], *rows[0].get("chosen", {})]
    blocks: list[Block] = []
    for first in range(0, len(names), 9):
        shown_names = names[first : first + 9]
        cells = [
            [*r["labels"].values(), *r.get("chosen", {}).values(), *(_cell(r, key) for key in shown_names)]
            for r in rows
        ]
        label = f"Measures {first + 1} to {first + len(shown_names)}" if len(names) > 9 else ""
        blocks.append(Table([*head, *map(_meaning, shown_names)], cells, PAIRED, len(head), label))
    panels = []
    for outcome in dict.fromkeys(v["outcome"] for v in found["verdicts"].values()):
        dots = [
            Dot(
                " ".join(r["labels"].values()),
                i,
                m["mean"],
                *(_finite(m[key], m["mean"]) for key in ("low", "high")),
            )
            for i, r in enumerate(rows)
            if (m := r["measures"].get(outcome)) and number(m["mean"]) is not None
        ]
        panels += [Dots(_meaning(outcome), dots, 0.0 if outcome.startswith("gap") else None)] if dots else []
    lost = [f"No number of {_meaning(key)}: {', '.join(runs)}." for key, runs in found["lacking"].items()]
    figure = (
        [Figure(f"Outcomes of {title}", panels, "Less is better. Means with 95 % intervals.")]
        if panels
        else []
    )
    return [*blocks, *figure, *([Items(lost)] if lost else [])]


def _finite(limit: Any, mean: float) -> float:
    return mean if number(limit) is None else float(limit)


def _cell(row: dict[str, Any], name: str) -> Cell:
    measure, gap = row["measures"].get(name), row.get("differences", {}).get(name) or {}
    if measure is None or number(measure["mean"]) is None:
        return Cell(DASH)
    p = number(gap.get("p_holm"))
    return _mean(measure, "{:.4g}", "*" if p is not None and p < 0.05 else "")


def _mean(measure: dict[str, Any], form: str, mark: str = "") -> Cell:
    half = None if number(measure["high"]) is None else measure["high"] - measure["mean"]
    return Cell(shown(measure["mean"], form) + mark, "" if half is None else f"± {half:.2g}")


def _study(found: dict[str, Any]) -> list[Block]:
    """Return the fixed points, and the fitted learners' outcome in every cell."""
    keys: Sequence[str] = [key for key in found["fixed_points"][0] if key != "contestant"]
    fixed = [
        [point["contestant"], *(shown(point[key], "{:.4f}") for key in keys)]
        for point in found["fixed_points"]
    ]
    names = list(found["rows"][0]["contestants"])
    outcome = next((verdict["outcome"] for verdict in found["verdicts"].values()), "js")
    rows = [
        [
            f"{r['V']} tokens, share {r['share']:g}, {r['tokens']:,} drawn",
            *(_mean(r["contestants"][n][outcome], "{:.4f}") for n in names),
        ]
        for r in found["rows"]
    ]
    caption = (
        f"{_meaning(outcome)} between truth and learner, in nats: means with 95 % intervals. Share: how far tokens that "
        "are plausible together lie close together in the costs' embedding."
    )
    return [
        Table(["Objective", *map(_meaning, keys)], fixed, SETTLED, label="Where training settles"),
        Table(["Language and sample", *names], rows, caption, label="Fitted learners"),
    ]
