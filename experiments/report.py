"""The answers of a sweep or of the whole evidence as a document, with the numbers of every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emo.common.report.document import Block, Cell, Document, Items, Row, Section, Table, estimated
from emo.common.report.figure import Dots, Figure
from emo.common.report.numbers import DASH, Effect, between, formatted
from emo.common.untrusted import number

ANSWERS = {"yes": ("Yes", "better"), "no": ("No", "worse"), "undecided": ("Undecided", "unclear")}
# What the numbers of a row are called, where their name does not say it.
MEANING = {
    **{
        "validation_nll": "dev nats",
        "test_nats": "test nats",
        "js": "JS",
        "kl_pq": "KL(P, Q)",
        "kl_qp": "KL(Q, P)",
    },
    **{
        "tv": "total variation",
        "tail_mass": "mass where P < 1e-4",
        "entropy_q": "entropy",
        "rouge_l": "ROUGE-L",
    },
    **{"kl_from_tempered_truth": "KL from tempered P", "oracle_nats": "oracle's nats of its samples"},
    **{
        "floor_nats": "floor",
        "tempered_js": "JS at that temperature",
        "gap_tail_mass": "tail minus tempered MLE",
    },
    **{"baseline_temperature": "temperature of equal entropy", "forward_ce": "forward CE"},
    **{"reverse_ce": "reverse CE", "distinct_2": "distinct-2", "repetition_4": "repetition-4"},
}
PAIRED = (
    "Means over repetitions with 95 % intervals; *: differs from the baseline (paired, Holm, 0.05). (end): "
    "chosen at an end of its grid, beyond which a better value may lie."
)
SETTLED = (
    "Where training would settle with unlimited data and capacity. Temperature: at which the truth would be "
    "as certain; KL from tempered P: what that leaves over; settled: share of truths with such a point."
)
ANSWERED = (
    "Better by: the paired difference that decides; above zero is better. Yes: every interval lies above "
    "zero. Their level is such that all hold together."
)


def sweep(results: dict[str, Any]) -> Document:
    """Return the table of one experiment."""
    sections = [Section("Answers", _answers(results["verdicts"])), Section("Rows", *_rows("Rows", results))]
    return Document("Experiment", _sentences(results["verdicts"]), f"Code: {results['code']}.", sections)


def evidence(results: dict[str, Any], titles: Mapping[str, tuple[str, str]]) -> Document:
    """Return all parts. titles: title of each part, and its subject; results: of `evidence.gather`."""
    lacking, verdicts = results["left_out"], results["verdicts"]
    parts, effects = [], []
    for name, part in results["parts"].items():
        title, about = titles[name]
        blocks = _study(part) if "fixed_points" in part else _rows(title, part)
        parts.append(Section(title, about, lacking.get(name, ""), *blocks))
    for i, f in enumerate(verdicts.values()):
        values = [x for key in ("effect", "low", "high") if (x := number(f[key])) is not None]
        effects += [Effect(f["question"], i, 0, *values)] if len(values) == 3 else []
    lost = [f"{titles[name][0]}: {why}" for name, why in lacking.items() if name not in results["parts"]]
    sections = [
        Section("Answers", _answers(verdicts)),
        *parts,
        Section("What was left out", Items(lost)),
        Section("What was cut", Items(results["cut"])),
    ]
    about = "Objectives where the truth is known, and where it is not. "
    about += f"Code {results['code']}, {results['minutes']} min."
    picture = Figure("Answers", [Dots("Better by", effects, 0.0)], "Right of the dotted line: better.")
    return Document("The evidence", _sentences(verdicts), about, sections, picture, data=results)


def _sentences(verdicts: dict[str, Any]) -> list[str]:
    sentences = []
    for f in verdicts.values():
        limits = between(f["low"], f["high"], "{:.4f}")
        size = f"{formatted(f['effect'], '{:+.4f}')} in {_meaning(f['outcome'])}"
        facts = f"{f'interval {limits}, ' if limits else ''}above zero is better, n {f['n']}"
        sentences.append(f"{f['question']} {ANSWERS[f['answer']][0]}: {size} ({facts}).")
    return sentences or ["No question was asked."]


def _meaning(name: str) -> str:
    base = f"{_meaning(name[4:])} minus tempered MLE" if name.startswith("gap_") else name
    return MEANING.get(name, base)


def _answers(verdicts: dict[str, Any]) -> Table:
    rows: list[Row] = []
    for verdict in verdicts.values():
        for name, answer in {"": verdict, **verdict.get("also", {})}.items():
            word, tone = ANSWERS[answer["answer"]]
            question = f"{verdict['question']} ({name})" if name else verdict["question"]
            better = estimated(answer["effect"], answer["low"], answer["high"], "{:.4f}")
            rows.append([question, Cell(word, tone=tone), better, _meaning(answer["outcome"]), answer["n"]])
    return Table(["Question", "Answer", "Better by", "Outcome", "n"], rows, ANSWERED, 2)


def _rows(title: str, part: dict[str, Any]) -> list[Block]:
    """Return the rows of a sweep as a table, and its questions' outcomes as a figure."""
    rows: list[Row] = []
    names = list(dict.fromkeys(key for row in part["rows"] for key in row["measures"]))
    axes = list(part["rows"][0].get("chosen", {}))
    effects: dict[str, list[Effect]] = {v["outcome"]: [] for v in part["verdicts"].values()}
    for i, row in enumerate(part["rows"]):
        chosen = [row.get("chosen", {}).get(a, DASH) + " (end)" * (a in row.get("at_end", ())) for a in axes]
        p_values = {n: number((row.get("differences", {}).get(n) or {}).get("p_holm")) for n in names}
        marks = ["*" if p is not None and p < 0.05 else "" for p in p_values.values()]
        cells = [_mean(row["measures"].get(n), "{:.4g}", m) for n, m in zip(names, marks, strict=True)]
        rows.append([*row["labels"].values(), *chosen, *cells])
        for outcome, panel in effects.items():
            measure = row["measures"].get(outcome) or {}
            mean, low, high = (number(measure.get(key)) for key in ("mean", "low", "high"))
            if mean is not None:
                limits = (mean if limit is None else limit for limit in (low, high))
                panel.append(Effect(" ".join(row["labels"].values()), i, 0, mean, *limits))
    head = [*part["rows"][0]["labels"], *axes]
    zero = {outcome: 0.0 if outcome.startswith("gap") else None for outcome in effects}
    panels = [Dots(_meaning(outcome), panel, zero[outcome]) for outcome, panel in effects.items()]
    lost = [f"No number of {_meaning(key)}: {', '.join(runs)}." for key, runs in part["lacking"].items()]
    figure = Figure(f"Outcomes of {title}", panels, "Less is better. Means with 95 % intervals.")
    return [Table([*head, *map(_meaning, names)], rows, PAIRED, len(head)), figure, Items(lost)]


def _mean(measure: dict[str, Any] | None, form: str, mark: str = "") -> Cell:
    mean, high = (number((measure or {}).get(key)) for key in ("mean", "high"))
    half = "" if mean is None or high is None else f"± {high - mean:.2g}"
    return Cell(formatted(mean, form) + mark, half)


def _study(part: dict[str, Any]) -> list[Block]:
    """Return the fixed points, and the fitted learners' outcome in every cell."""
    points, names = part["fixed_points"], list(part["rows"][0]["contestants"])
    keys = [key for key in points[0] if key != "contestant"]
    fixed = [[point["contestant"], *(formatted(point[key], "{:.4f}") for key in keys)] for point in points]
    outcome = next((verdict["outcome"] for verdict in part["verdicts"].values()), "js")
    rows: list[Row] = []
    for row in part["rows"]:
        sample = f"{row['V']} tokens, share {row['share']:g}, {row['tokens']:,} drawn"
        rows.append([sample, *(_mean(row["contestants"][name][outcome], "{:.4f}") for name in names)])
    caption = (
        f"{_meaning(outcome)} between truth and learner, in nats: means with 95 % intervals. Share: how far "
        "tokens that are plausible together lie close together in the costs' embedding."
    )
    return [
        Table(["Objective", *map(_meaning, keys)], fixed, SETTLED, label="Where training settles"),
        Table(["Language and sample", *names], rows, caption, label="Fitted learners"),
    ]
