"""Results of sweeps and of the evidence as JSON, and as documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from emo.common.errors import UserError
from emo.common.io.untrusted import number
from emo.common.provenance import code_version
from emo.common.report.document import (
    Block,
    Cell,
    Document,
    Items,
    ReportSection,
    Row,
    Table,
    drawn,
    estimated,
)
from emo.common.report.figure import Cells, Figure, colour, style, svg_file
from emo.common.report.numbers import DASH, Effect, format_interval, formatted
from emo.eval.results.stats import holm

from .. import pareto
from .design import Experiment, Front, Labels, Prediction, RunSpec
from .statistics import MapRow, estimate, is_grid_end, paired_difference, paired_verdict, rank_correlation
from .sweep import Sweep

Json = dict[str, Any]  # a part of results.json
ANSWERS = {
    "yes": ("Yes", "better"),
    "no": ("No", "worse"),
    "undecided": ("Undecided", "unclear"),
    "depends": ("It depends", "unclear"),
}
PAIRED = (
    "Means over repetitions with 95 % intervals. *: differs from the baseline (paired test, Holm, 0.05). "
    "(end): chosen at the end of its grid, so that a better value may lie outside. validation_nll, *_nats: "
    "nats per token. js, kl, tv: divergences from the true distribution P. gap_*: difference from MLE "
    "tempered to the same entropy."
)
SETTLED = (
    "Fixed points of training with unlimited data and capacity. temperature: at which the truth has the same "
    "entropy. kl_from_tempered_truth: divergence that remains. settled: share of truths with a fixed point."
)
ANSWERED = (
    "Better by: the decisive paired difference; above zero is better. Yes: all intervals lie above zero. The "
    "intervals are simultaneous. For a map: minimum and maximum over its cells."
)
CORRELATED = "Spearman's correlation over runs with a 95 % bootstrap interval."
MAPPED = (
    "Better by, in {outcome}: blue is better, orange is worse, no colour is undecided. The intervals of all "
    "cells are simultaneous. The unit is a random truth; each cell has {n}."
)


def gather_results(work: Sweep) -> Json:
    """Return the results of an experiment: `rows` by labels, and `verdicts`.

    Raises UserError if runs are missing, because a partial table would be another experiment.
    """
    experiment = work.experiment
    missing = [task.run.name for task in work.tasks() if not task.done]
    if missing:
        problem = f"{len(missing)} runs are not done, for example {missing[0]}; run the experiment first"
        raise UserError(problem, code="not-done")
    rows = _gather_rows(work)
    _add_differences(experiment, rows)
    results: Json = {"code": code_version(), "rows": rows}
    results["verdicts"] = {name: answer_question(experiment, name, rows) for name in experiment.questions}
    results["lacking"] = _find_missing_values(experiment, rows)
    if experiment.fronts:
        fronts = experiment.fronts.items()
        results["fronts"] = {name: compare_fronts(experiment, front, rows) for name, front in fronts}
    if experiment.predictions:
        results["predictions"] = {
            name: prediction.model_dump() | correlate(prediction, rows)
            for name, prediction in experiment.predictions.items()
        }
    for row in rows:
        del row["values"]
    return results


def _gather_rows(work: Sweep) -> list[Json]:
    """Return a row for each group of runs that differ only in the repetition and the chosen label."""
    experiment = work.experiment
    choose = work.experiment.choose
    ignored = (experiment.repeat, choose.axis) if choose else (experiment.repeat,)
    groups: dict[Labels, list[RunSpec]] = {}
    for run in work.reported():
        groups.setdefault(run.without(*ignored), []).append(run)
    rows = []
    for labels, runs in groups.items():
        measured = [work.values(run) for run in runs]
        metrics = dict.fromkeys(metric for values in measured for metric in values)
        columns = {metric: [values.get(metric, math.nan) for values in measured] for metric in metrics}
        row: Json = {"labels": dict(labels), "runs": [run.name for run in runs], "values": columns}
        if choose is not None:
            label = runs[0].labels.get(choose.axis, "-")
            row["chosen"] = {choose.axis: label}
            row["at_end"] = [choose.axis] if is_grid_end(label, experiment.axes[choose.axis]) else []
        row["measures"] = {metric: estimate(values) for metric, values in columns.items()}
        rows.append(row)
    return rows


def _add_differences(experiment: Experiment, rows: list[Json]) -> None:
    """Add each row's differences from the baseline, with p-values corrected over all rows of a metric."""
    by_labels = {tuple(row["labels"].items()): row for row in rows}
    for metric in dict.fromkeys(metric for row in rows for metric in row["values"]):
        gaps = []
        for row in rows:
            labels = row["labels"] | {experiment.compare.axis: experiment.compare.baseline}
            base = by_labels[tuple(labels.items())]
            if base is not row and metric in row["values"] and metric in base["values"]:
                gap = paired_difference(row["values"][metric], base["values"][metric])
                row.setdefault("differences", {})[metric] = gap
                gaps.append(gap)
        for gap, p in zip(gaps, holm([gap["p"] for gap in gaps]), strict=True):
            gap["p_holm"] = p


def _find_missing_values(experiment: Experiment, rows: list[Json]) -> dict[str, list[str]]:
    """Return the runs without a finite value, by decisive metric."""
    missing: dict[str, list[str]] = {}
    for metric in experiment.decisive:
        for row in rows:
            for name, value in zip(row["runs"], _row_values(row, metric), strict=True):
                if not math.isfinite(value):
                    missing.setdefault(metric, []).append(name)
    return missing


def answer_question(experiment: Experiment, name: str, rows: list[Json]) -> Json:
    """Return the verdict on a question. Its units are repetitions, averaged over the groups of a label."""
    question = experiment.questions[name]
    axis = experiment.compare.axis
    units: dict[str, list[float]] = {}
    for label in (question.better, *question.than):
        groups = [_row_values(row, question.outcome) for row in rows if row["labels"][axis] == label]
        units[label] = [fmean(values) for values in zip(*groups, strict=True)]
    others = [units[label] for label in question.than]
    result = paired_verdict(units[question.better], others, question.least)
    return {"question": question.text, "outcome": question.outcome, **result}


def compare_fronts(experiment: Experiment, front: Front, rows: list[Json]) -> Json:
    """Return how much more each label loses than the baseline at equal gain, and the points of all runs."""
    axis = experiment.compare.axis
    baseline = experiment.compare.baseline
    points: dict[str, list[list[pareto.Point]]] = {}  # by label and repetition
    for row in rows:
        pairs = zip(_row_values(row, front.gained), _row_values(row, front.lost), strict=True)
        by_repetition = points.setdefault(row["labels"][axis], [[] for _ in row["runs"]])
        for repetition, point in zip(by_repetition, pairs, strict=True):
            repetition.append(point)
    labels = {}
    for label, repetitions in points.items():
        if label != baseline:
            gaps = map(pareto.front_gap, repetitions, points[baseline])
            labels[label] = estimate(list(gaps))
    names = {"text": front.text, "gained": front.gained, "lost": front.lost}
    return {**names, "labels": labels, "points": points}


def correlate(prediction: Prediction, rows: list[Json]) -> Json:
    """Return the rank correlation of a prediction over the runs of all rows."""
    x, y = ([v for row in rows for v in _row_values(row, m)] for m in (prediction.by, prediction.of))
    return {**rank_correlation(x, y)}


def draw_fronts(fronts: Json) -> str:
    """Return an SVG with a panel for each front and a point for each run.

    A line joins the runs of a repetition. Runs without a finite value are left out.
    """

    def draw(canvas: Any) -> None:
        grid = canvas.subplots(1, len(fronts), squeeze=False)[0]
        for axes, front in zip(grid, fronts.values(), strict=True):
            for series, (label, repetitions) in enumerate(front["points"].items()):
                variable, marker, _ = style(series)
                look = {"color": colour(variable), "marker": marker, "markersize": 4, "linewidth": 0.6}
                for i, points in enumerate(repetitions):
                    finite = sorted(point for point in points if None not in point)
                    gained, lost = zip(*finite, strict=True) if finite else ((), ())
                    axes.plot(gained, lost, **look, label="" if i else label)
            axes.set_title(front["text"])
            axes.set_xlabel(f"{front['gained']} (a gain is to the left)")
            axes.set_ylabel(front["lost"])
            axes.grid(color=colour("rule"), linewidth=0.6)
        handles, names = grid[0].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside lower center", ncols=6, frameon=False)

    return svg_file("fronts", (4 * len(fronts), 3.6), draw)


def _row_values(row: Json, metric: str) -> list[float]:
    """Return a metric of a row's runs. NaN for runs without it."""
    return row["values"].get(metric, [math.nan] * len(row["runs"]))


def sweep_document(results: Json) -> Document:
    """Return the report on one experiment."""
    sections = [ReportSection("Answers", _verdict_table(results["verdicts"]))]
    sections += [ReportSection("Rows", *_row_blocks(results))]
    sections += [ReportSection("Fronts", _front_table(front)) for front in results.get("fronts", {}).values()]
    sections += [ReportSection("Predictions", _prediction_table(results.get("predictions", {})))]
    answer = _verdict_sentences(results["verdicts"])
    return Document("Experiment", answer, f"Code: {results['code']}.", sections)


def evidence_document(results: Json, titles: Mapping[str, tuple[str, str]]) -> Document:
    """Return the report on all parts of the evidence. titles: title and subject by part."""
    left_out = results["left_out"]
    verdicts = results["verdicts"]
    sections = [ReportSection("Answers", _verdict_table(verdicts))]
    for name, part in results["parts"].items():
        title, about = titles[name]
        is_study = "fixed_points" in part
        blocks = _study_blocks(part) if is_study else [_verdict_table(part["verdicts"]), *_row_blocks(part)]
        blocks += [_front_table(front) for front in part.get("fronts", {}).values()]
        sections.append(ReportSection(title, about, left_out.get(name, ""), *blocks))
    reasons = [f"{titles[name][0]}: {why}" for name, why in left_out.items() if name not in results["parts"]]
    sections.append(ReportSection("What was left out", Items(reasons)))
    sections.append(ReportSection("What was cut", Items(results["cut"])))
    effects = []
    for verdict in verdicts.values():
        values = [x for key in ("effect", "low", "high") if (x := number(verdict.get(key))) is not None]
        effects += [Effect(verdict["question"], 1, 0, *values)] if len(values) == 3 else []
    about = "Objectives with a known and with an unknown true distribution. "
    about += f"Code {results['code']}, {results['minutes']} min."
    rows: list[Row] = [[effect.label, *drawn(effect, "{:+.4f}")] for effect in effects]
    picture = Table(["Question", "← worse · better →", "Better by"], rows)
    return Document("The evidence", _verdict_sentences(verdicts), about, sections, picture, data=results)


def _verdict_sentences(verdicts: Json) -> list[str]:
    sentences = []
    for verdict in verdicts.values():
        facts = _cell_counts(verdict) if "cells" in verdict else _effect_facts(verdict)
        sentence = f"{verdict['question']} {ANSWERS[verdict['answer']][0]}: {facts}."
        for name, part in verdict.get("also", {}).items():
            if "cells" in part:
                sentence += f" On the map {name}: {_cell_counts(part)}."
        sentences.append(sentence)
    return sentences or ["The experiment has no questions."]


def _effect_facts(verdict: Json) -> str:
    limits = format_interval(verdict["low"], verdict["high"], "{:.4f}")
    facts = f"{f'interval {limits}, ' if limits else ''}above zero is better, n {verdict['n']}"
    return f"{formatted(verdict['effect'], '{:+.4f}')} in {verdict['outcome']} ({facts})"


def _cell_counts(part: Json) -> str:
    """Return the number of cells of a map by answer, as text."""
    counts = (f"{word} in {len(cells)}" for word, cells in part["cells"].items() if cells)
    return f"{', '.join(counts)} of {sum(map(len, part['cells'].values()))} cells"


def _verdict_table(verdicts: Json) -> Table:
    rows: list[Row] = []
    for main in verdicts.values():
        for name, part in {"": main, **main.get("also", {})}.items():
            word, tone = ANSWERS[part["answer"]]
            question = f"{main['question']} ({name})" if name else main["question"]
            better: Cell | str
            if "cells" in part:
                better = f"{formatted(part['least'], '{:+.4f}')} to {formatted(part['most'], '{:+.4f}')}"
                cell = Cell(word, _cell_counts(part), tone=tone)
            else:
                better = estimated(part["effect"], part["low"], part["high"], "{:.4f}")
                cell = Cell(word, tone=tone)
            rows.append([question, cell, better, part["outcome"], part["n"]])
    return Table(["Question", "Answer", "Better by", "Outcome", "n"], rows, ANSWERED, 2)


def _row_blocks(part: Json) -> list[Block]:
    """Return the table of a sweep, and the list of runs without a decisive number."""
    rows: list[Row] = []
    names = list(dict.fromkeys(key for row in part["rows"] for key in row["measures"]))
    axes = list(part["rows"][0].get("chosen", {}))
    for row in part["rows"]:
        cells: list[Cell | str] = [*row["labels"].values()]
        cells += [row.get("chosen", {}).get(a, DASH) + " (end)" * (a in row.get("at_end", ())) for a in axes]
        for name in names:
            p = number(row.get("differences", {}).get(name, {}).get("p_holm"))
            mark = "*" if p is not None and p < 0.05 else ""
            cells.append(_mean_cell(row["measures"].get(name, {}), "{:.4g}", mark))
        rows.append(cells)
    head = [*part["rows"][0]["labels"], *axes]
    missing = [f"No value of {name}: {', '.join(runs)}." for name, runs in part["lacking"].items()]
    return [Table([*head, *names], rows, PAIRED, len(head)), Items(missing)]


def _front_table(front: Json) -> Table:
    labels = front["labels"].items()
    rows: list[Row] = [[label, _mean_cell(gap, "{:+.4f}"), gap["n"]] for label, gap in labels]
    caption = (
        f"{front['lost']} minus the baseline's at equal {front['gained']}: mean over the common range, with "
        "95 % intervals over repetitions. Below zero is better. -: no common range."
    )
    return Table(["Runs", "Lost", "n"], rows, caption, 1, label=front["text"])


def _mean_cell(measure: Json, form: str, mark: str = "") -> Cell:
    mean = number(measure.get("mean"))
    high = number(measure.get("high"))
    half = "" if mean is None or high is None else f"± {high - mean:.2g}"
    return Cell(formatted(mean, form) + mark, half)


def _study_blocks(part: Json) -> list[Block]:
    """Return the maps of a study, a table of fitted learners, and a table of fixed points."""
    points = part["fixed_points"]
    rows = part["rows"]
    first: Json = next(iter(part["verdicts"].values()), {})
    outcome = first.get("outcome", "js")
    caption = MAPPED.format(outcome=outcome, n=first.get("n"))
    blocks: list[Block] = []
    for name in part["verdicts"]:
        blocks.append(Figure(f"Map of {name}", [build_map(rows, name)], caption))
    names = list(rows[0]["contestants"])
    fitted: list[Row] = []
    for row in rows:
        cells = (_mean_cell(row["contestants"][name][outcome], "{:.4f}") for name in names)
        fitted.append([f"{row['V']} tokens, share {row['share']:g}, {row['draws']:,} draws", *cells])
    caption = (
        f"{outcome} between truth and learner in nats: means with 95 % intervals. Share: how closely tokens "
        "with similar contexts lie in the costs' embedding. Draws: per context."
    )
    blocks.append(Table(["Language and sample", *names], fitted, caption, label="Fitted learners"))
    keys = [key for key in points[0] if key != "contestant"]
    fixed = [[point["contestant"], *(formatted(point[key], "{:.4f}") for key in keys)] for point in points]
    blocks.append(Table(["Objective", *keys], fixed, SETTLED, label="Fixed points of training"))
    return blocks


def build_map(rows: list[MapRow], question: str) -> Cells:
    """Return a question's verdicts over the cells of a study: shares and draws across, vocabularies down."""
    effects: dict[tuple[float, float, float], Effect] = {}
    for row in rows:
        verdict = row["verdicts"][question]
        direction = {"yes": 1, "no": -1}.get(verdict["answer"], 0)
        effect = Effect("", None, direction, verdict["effect"], verdict["low"], verdict["high"])
        effects[row["V"], row["share"], row["draws"]] = effect
    sizes, shares, counts = (sorted(set(axis)) for axis in zip(*effects, strict=True))
    columns = list(itertools.product(shares, counts))
    grid = [(f"{V} tokens", [effects.get((V, *column)) for column in columns]) for V in sizes]
    names = [f"{draws:,}\n{share:g}" for share, draws in columns]
    return Cells(question, names, grid, "draws per context; share of geometry in the truth")


def _prediction_table(predictions: Json) -> Table:
    rows: list[Row] = [
        [p["text"], p["by"], p["of"], estimated(p["mean"], p["low"], p["high"], "{:+.2f}"), p["n"]]
        for p in predictions.values()
    ]
    return Table(["Question", "By", "Of", "Rank correlation", "n"], rows, CORRELATED, 3)
