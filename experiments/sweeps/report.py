"""The numbers of an experiment, and the answers of a sweep or of the whole evidence as a document.

Numbers are means with intervals, differences from the baseline, and verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from emo.common.errors import UserError
from emo.common.io.untrusted import number
from emo.common.provenance import code_version
from emo.common.report.document import Block, Cell, Document, Items, ReportSection, Row, Table, estimated
from emo.common.report.figure import Cells, Dots, Figure
from emo.common.report.numbers import DASH, Effect, format_interval, formatted
from emo.eval.results.stats import holm

from .. import pareto
from .design import Experiment, Front, Labels, Run
from .statistics import at_an_end, difference, estimate, verdict
from .sweep import Sweep

ANSWERS = {
    "yes": ("Yes", "better"),
    "no": ("No", "worse"),
    "undecided": ("Undecided", "unclear"),
    "depends": ("It depends", "unclear"),
}
PAIRED = (
    "Means over repetitions with 95 % intervals; *: differs from the baseline (paired, Holm, 0.05). (end): "
    "chosen at an end of its grid, beyond which a better value may lie. validation_nll, *_nats: nats per "
    "token. js, kl, tv: divergences from the truth P. gap_*: minus MLE tempered to the same entropy."
)
SETTLED = (
    "Where training would settle with unlimited data and capacity. temperature: at which the truth would be "
    "as certain; kl_from_tempered_truth: what that leaves over; settled: share of truths with such a point."
)
ANSWERED = (
    "Better by: the paired difference that decides; above zero is better. Yes: every interval lies above "
    "zero. Their level is such that all hold together. Of a map: the least and the most of its cells."
)
MAPPED = (
    "Better by, in {outcome}: blue is better, orange is worse, no colour is undecided. The intervals of all "
    "cells hold together; the unit is a random truth, of which each cell has {n} of its own."
)


def gather(sweep: Sweep) -> dict[str, Any]:
    """Return all numbers of an experiment: `rows` by group of labels, and `verdicts`.

    Raises UserError when runs are missing: a table of a part would be another experiment.
    """
    experiment, choose = sweep.experiment, sweep.experiment.choose
    missing = [task.run.name for task in sweep.tasks() if not task.done]
    if missing:
        problem = f"{len(missing)} runs are not done, for example {missing[0]}; run the experiment first"
        raise UserError(problem, code="not-done")
    aside = (experiment.repeat, choose.axis) if choose else (experiment.repeat,)
    groups: dict[Labels, list[Run]] = {}
    for run in sweep.reported():
        groups.setdefault(run.without(*aside), []).append(run)
    rows = []
    for labels, runs in groups.items():
        measured = [sweep.values(run) for run in runs]
        metrics = dict.fromkeys(metric for values in measured for metric in values)
        columns = {metric: [values.get(metric, math.nan) for values in measured] for metric in metrics}
        row: dict[str, Any] = {"labels": dict(labels), "runs": [run.name for run in runs], "values": columns}
        if choose is not None:
            label = runs[0].labels.get(choose.axis, "-")
            row["chosen"] = {choose.axis: label}
            row["at_end"] = [choose.axis] if at_an_end(label, experiment.axes[choose.axis]) else []
        row["measures"] = {metric: estimate(values) for metric, values in columns.items()}
        rows.append(row)
    by_labels = {tuple(row["labels"].items()): row for row in rows}
    for metric in dict.fromkeys(metric for row in rows for metric in row["values"]):
        gaps = []  # from the baseline; p-values are corrected over all comparisons of a metric
        for row in rows:
            labels = row["labels"] | {experiment.compare.axis: experiment.compare.baseline}
            base = by_labels[tuple(labels.items())]
            if base is not row and metric in row["values"] and metric in base["values"]:
                gap = difference(row["values"][metric], base["values"][metric])
                row.setdefault("differences", {})[metric] = gap
                gaps.append(gap)
        for gap, p in zip(gaps, holm([gap["p"] for gap in gaps]), strict=True):
            gap["p_holm"] = p
    verdicts = {name: answer(experiment, name, rows) for name in experiment.questions}
    fronts = {name: lost(experiment, front, rows) for name, front in experiment.fronts.items()}
    lacking: dict[str, list[str]] = {}
    for metric in experiment.decisive:
        for name, value in (
            (n, v) for r in rows for n, v in zip(r["runs"], _outcomes(r, metric), strict=True)
        ):
            if not math.isfinite(value):
                lacking.setdefault(metric, []).append(name)
    for row in rows:
        del row["values"]
    results = {"code": code_version(), "rows": rows, "verdicts": verdicts, "lacking": lacking}
    return results | ({"fronts": fronts} if fronts else {})


def answer(experiment: Experiment, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict on a question; its units are repetitions, which share seed and data over all groups.

    The value of a repetition is its mean over the groups that differ in other labels than what is compared.
    """
    question, axis = experiment.questions[name], experiment.compare.axis
    units: dict[str, list[float]] = {}
    for label in (question.better, *question.than):
        groups = [_outcomes(row, question.outcome) for row in rows if row["labels"][axis] == label]
        units[label] = [fmean(values) for values in zip(*groups, strict=True)]
    others = [units[label] for label in question.than]
    result = verdict(units[question.better], others, question.least)
    return {"question": question.text, "outcome": question.outcome, **result}


def lost(experiment: Experiment, front: Front, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what each label loses more than the baseline at equal gain, with intervals over repetitions."""
    axis, baseline = experiment.compare.axis, experiment.compare.baseline
    points: dict[str, list[list[pareto.Point]]] = {}  # by label and repetition
    for row in rows:
        pairs = zip(_outcomes(row, front.gained), _outcomes(row, front.lost), strict=True)
        for repetition, point in enumerate(pairs):
            of_label = points.setdefault(row["labels"][axis], [[] for _ in row["runs"]])
            of_label[repetition].append(point)
    labels = {}
    for label, repetitions in points.items():
        if label != baseline:
            pairs_of_fronts = zip(repetitions, points[baseline], strict=True)
            labels[label] = estimate([pareto.gap(*pair) for pair in pairs_of_fronts])
    return {"text": front.text, "gained": front.gained, "lost": front.lost, "labels": labels}


def _outcomes(row: dict[str, Any], metric: str) -> list[float]:
    """Return a metric of a row's runs, in their order; NaN where one has no number."""
    return row["values"].get(metric, [math.nan] * len(row["runs"]))


def sweep(results: dict[str, Any]) -> Document:
    """Return the table of one experiment."""
    sections = [
        ReportSection("Answers", _answers(results["verdicts"])),
        ReportSection("Rows", *_rows(results)),
    ]
    sections += [ReportSection("Fronts", _front(front)) for front in results.get("fronts", {}).values()]
    return Document("Experiment", _sentences(results["verdicts"]), f"Code: {results['code']}.", sections)


def evidence(results: dict[str, Any], titles: Mapping[str, tuple[str, str]]) -> Document:
    """Return all parts. titles: title of each part, and its subject; results: of `evidence.gather`."""
    lacking, verdicts = results["left_out"], results["verdicts"]
    sections = [ReportSection("Answers", _answers(verdicts))]
    for name, part in results["parts"].items():
        title, about = titles[name]
        blocks = _study(part) if "fixed_points" in part else [_answers(part["verdicts"]), *_rows(part)]
        blocks += [_front(front) for front in part.get("fronts", {}).values()]
        sections.append(ReportSection(title, about, lacking.get(name, ""), *blocks))
    lost = [f"{titles[name][0]}: {why}" for name, why in lacking.items() if name not in results["parts"]]
    sections += [
        ReportSection("What was left out", Items(lost)),
        ReportSection("What was cut", Items(results["cut"])),
    ]
    effects = []
    for i, f in enumerate(verdicts.values()):
        values = [x for key in ("effect", "low", "high") if (x := number(f.get(key))) is not None]
        effects += [Effect(f["question"], i, 0, *values)] if len(values) == 3 else []
    about = "Objectives where the truth is known, and where it is not. "
    about += f"Code {results['code']}, {results['minutes']} min."
    picture = Figure("Answers", [Dots("Better by", effects, 0.0)], "Right of the dotted line: better.")
    return Document("The evidence", _sentences(verdicts), about, sections, picture, data=results)


def _sentences(verdicts: dict[str, Any]) -> list[str]:
    sentences = []
    for f in verdicts.values():
        facts = _counts(f) if "cells" in f else _effect(f)
        sentence = f"{f['question']} {ANSWERS[f['answer']][0]}: {facts}."
        maps = {name: part for name, part in f.get("also", {}).items() if "cells" in part}
        sentences.append(" ".join([sentence, *(f"On the map {k}: {_counts(v)}." for k, v in maps.items())]))
    return sentences or ["No question was asked."]


def _effect(f: dict[str, Any]) -> str:
    """Return a verdict's effect with its interval."""
    limits = format_interval(f["low"], f["high"], "{:.4f}")
    facts = f"{f'interval {limits}, ' if limits else ''}above zero is better, n {f['n']}"
    return f"{formatted(f['effect'], '{:+.4f}')} in {f['outcome']} ({facts})"


def _counts(part: dict[str, Any]) -> str:
    """Return how many cells of a map have each answer."""
    counts = (f"{word} in {len(cells)}" for word, cells in part["cells"].items() if cells)
    return f"{', '.join(counts)} of {sum(map(len, part['cells'].values()))} cells"


def _answers(verdicts: dict[str, Any]) -> Table:
    rows: list[Row] = []
    for main in verdicts.values():
        for name, part in {"": main, **main.get("also", {})}.items():
            word, tone = ANSWERS[part["answer"]]
            question = f"{main['question']} ({name})" if name else main["question"]
            better: Cell | str
            if "cells" in part:
                better = f"{formatted(part['least'], '{:+.4f}')} to {formatted(part['most'], '{:+.4f}')}"
                answer = Cell(word, _counts(part), tone=tone)
            else:
                better = estimated(part["effect"], part["low"], part["high"], "{:.4f}")
                answer = Cell(word, tone=tone)
            rows.append([question, answer, better, part["outcome"], part["n"]])
    return Table(["Question", "Answer", "Better by", "Outcome", "n"], rows, ANSWERED, 2)


def _rows(part: dict[str, Any]) -> list[Block]:
    """Return the rows of a sweep as a table, and the runs without a number that decides."""
    rows: list[Row] = []
    names = list(dict.fromkeys(key for row in part["rows"] for key in row["measures"]))
    axes = list(part["rows"][0].get("chosen", {}))
    for row in part["rows"]:
        cells: list[Cell | str] = [*row["labels"].values()]
        cells += [row.get("chosen", {}).get(a, DASH) + " (end)" * (a in row.get("at_end", ())) for a in axes]
        for name in names:
            p = number(row.get("differences", {}).get(name, {}).get("p_holm"))
            mark = "*" if p is not None and p < 0.05 else ""
            cells.append(_mean(row["measures"].get(name, {}), "{:.4g}", mark))
        rows.append(cells)
    head = [*part["rows"][0]["labels"], *axes]
    lost = [f"No number of {name}: {', '.join(runs)}." for name, runs in part["lacking"].items()]
    return [Table([*head, *names], rows, PAIRED, len(head)), Items(lost)]


def _front(front: dict[str, Any]) -> Table:
    rows: list[Row] = [[label, _mean(gap, "{:+.4f}"), gap["n"]] for label, gap in front["labels"].items()]
    caption = (
        f"{front['lost']} minus the baseline's at equal {front['gained']}: mean over what both reach, with "
        "95 % intervals over repetitions. Below zero: less is lost. -: nothing that both reach."
    )
    return Table(["Runs", "Lost", "n"], rows, caption, 1, label=front["text"])


def _mean(measure: dict[str, Any], form: str, mark: str = "") -> Cell:
    mean, high = number(measure.get("mean")), number(measure.get("high"))
    half = "" if mean is None or high is None else f"± {high - mean:.2g}"
    return Cell(formatted(mean, form) + mark, half)


def _study(part: dict[str, Any]) -> list[Block]:
    """Return the map of each question, the fitted learners' outcome in every cell, and the fixed points."""
    points, rows = part["fixed_points"], part["rows"]
    names, keys = list(rows[0]["contestants"]), [key for key in points[0] if key != "contestant"]
    fixed = [[point["contestant"], *(formatted(point[key], "{:.4f}") for key in keys)] for point in points]
    first: dict[str, Any] = next(iter(part["verdicts"].values()), {})
    outcome, n = first.get("outcome", "js"), first.get("n")
    fitted: list[Row] = []
    for row in rows:
        cells = (_mean(row["contestants"][name][outcome], "{:.4f}") for name in names)
        fitted.append([f"{row['V']} tokens, share {row['share']:g}, {row['draws']:,} draws", *cells])
    caption = (
        f"{outcome} between truth and learner, in nats: means with 95 % intervals. Share: how far "
        "tokens that are plausible together lie close together in the costs' embedding. Draws: per context."
    )
    words = MAPPED.format(outcome=outcome, n=n)
    maps = [Figure(f"Map of {name}", [map_of(rows, name)], words) for name in part["verdicts"]]
    return [
        *maps,
        Table(["Language and sample", *names], fitted, caption, label="Fitted learners"),
        Table(["Objective", *keys], fixed, SETTLED, label="Where training settles"),
    ]


def map_of(rows: list[dict[str, Any]], question: str) -> Cells:
    """Return a question's verdicts in the cells of a study: shares by draws across, vocabularies down."""
    axes = {key: sorted({row[key] for row in rows}) for key in ("V", "share", "draws")}
    effects: dict[tuple[Any, ...], Effect] = {}
    for row in rows:
        verdict = row["verdicts"][question]
        direction = {"yes": 1, "no": -1}.get(verdict["answer"], 0)
        effects[row["V"], row["share"], row["draws"]] = Effect(
            "", None, direction, verdict["effect"], verdict["low"], verdict["high"]
        )
    columns = [(share, draws) for share in axes["share"] for draws in axes["draws"]]
    grid = [(f"{V} tokens", [effects.get((V, *column)) for column in columns]) for V in axes["V"]]
    names = [f"{draws:,}\n{share:g}" for share, draws in columns]
    return Cells(question, names, grid, "draws per context; share of geometry in the truth")
