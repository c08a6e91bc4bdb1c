"""The report as one HTML file: its sections on results. Those that show rows and texts are in `evidence`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.page.figures import NARROW, WIDE, Shift, css_colour, shifts_figure
from common.page.figures import shortened as shortened_name
from common.page.parts import Markup, chip, figure, join, legend, page, row, section, table, tag
from common.text import counted
from eval.compare import ALPHA
from eval.report import evidence, judged, plots
from eval.report.gather import Report
from eval.report.numbers import (
    DASH,
    UNREADABLE,
    arrow,
    p_value,
    percent,
    points,
    shortened,
    span,
    spread,
)
from eval.report.order import method
from eval.results import Model

SCORE_TITLES = {
    "openicl_ppl": "whole-prompt perplexity",
    "suffix_sum": "label likelihood",
    "suffix_mean": "label likelihood per token",
    "channel": "channel",
    "calibrated": "calibrated",
}
SCORES_TEXT = (
    "Several ways to turn the same forward pass into a decision. Whole-prompt perplexity divides by the "
    "prompt's length, so every further token of a label earns the model's mean loss: labels of unequal "
    "length are favoured differently by models of unequal perplexity. The label likelihoods count the "
    "label's tokens only. Clean leaves out test rows whose text is found verbatim among the rows that "
    "demonstrations come from (leaked); shortened counts rows whose prompts lost demonstrations, and in "
    "brackets those that lost text of the query, to fit the model's context."
)
OVERLAP_TEXT = (
    " Trained on counts test rows that share long word sequences with the training text, as data "
    "preparation found them; without is the accuracy on the others."
)


def html(report: Report) -> str:
    """The whole page."""
    sections = [
        section("Remarks", *_remarks(report)),
        _results(report),
        *(_differences(report, first) for first in report.against),
        _scores(report),
        _training(report),
        _scaling(report),
        *judged.html(report.judgements, report.pairings),
        evidence.samples(report),
        evidence.confusions(report),
        evidence.worst(report),
        evidence.settings(report),
        evidence.made_with(report),
    ]
    return page(report.title, _lead(report), sections, report.notice)


def _remarks(report: Report) -> list[Markup]:
    found = [tag("li", remark) for remark in report.remarks]
    return [tag("ul", *found, class_="plain")] if found else []


def _lead(report: Report) -> str:
    judged = f"{counted(len(report.judgements), 'comparison')} of answers by judges."
    if not report.rows and report.judgements:
        return judged
    rows = max(sum(r["n"] for r in report.rows if r["model"] == m.name) for m in report.models)
    kinds = sorted({(r["shots"], str(r["retriever"])) for r in report.rows})
    how = "; ".join(f"{shots} ({by})" for shots, by in kinds)
    lead = (
        f"{counted(len(report.models), 'model')}, {counted(len(report.tasks), 'task')}, "
        f"{rows:,} test rows per model. Demonstrations per prompt: {how or 'none'}. Scored through OpenICL."
    )
    return f"{lead} {judged}" if report.judgements else lead


def name(number: int, model: Model, base: str = "", baseline: str | None = None) -> Markup:
    """A model as rows call it: colour, objective, name, and whether it is the baseline."""
    title = method(model, base)
    below = [] if title == model.name else [model.name]
    pill = tag("span", "baseline", class_="pill") if model.name == baseline else ""
    second = tag("span", *below, class_="sub") if below else ""
    return join(chip(css_colour(number)), tag("span", title, class_="method"), pill, second)


def _by_base(report: Report, columns: int, line: Callable[[int, Model, str], Markup]) -> list[Markup]:
    """A row per model, made by `line` of its number, itself and its base model, under its base model."""
    rows, number = [], 0
    titled = any(base for base, _ in report.groups)
    for base, models in report.groups:
        if titled:
            heading = tag("th", base or "Other models", colspan=str(columns), scope="colgroup")
            rows.append(tag("tr", heading, class_="group"))
        for model in models:
            rows.append(line(number, model, base))
            number += 1
    return rows


def _results(report: Report) -> Markup:
    if not report.rows:
        return Markup()
    tasks = report.tasks
    several = len(report.models) > 1
    best = {t: max(r["accuracy"] for r in report.rows if r["task"] == t) for t in tasks}
    means = {m.name: report.mean(m) for m in report.models}
    top = max((mean[0] for mean in means.values() if mean is not None), default=None)

    def cell(value: float, low: float, high: float, bold: bool, direction: int) -> Markup:
        shown = tag("b", percent(value)) if bold and several else percent(value)
        kind = {1: "up", -1: "down", 0: ""}[direction]
        mark = tag("span", f"\u00a0{arrow(direction)}", class_=kind) if direction else ""
        return join(shown, mark, tag("span", span(low, high), class_="ci"))

    def line(number: int, model: Model, base: str) -> Markup:
        cells: list[str] = [name(number, model, base, report.baseline)]
        for task in tasks:
            r = report.row(model.name, task)
            sure = report.direction(model.name, task)
            if r is None:
                cells.append(tag("span", UNREADABLE, class_="down") if task in model.unreadable else DASH)
            else:
                cells.append(cell(r["accuracy"], r["low"], r["high"], r["accuracy"] == best[task], sure))
        mean = means[model.name]
        sure = report.direction(model.name, None)
        cells.append(DASH if mean is None else cell(mean[0], mean[1].low, mean[1].high, mean[0] == top, sure))
        return row(cells)

    rows = _by_base(report, len(tasks) + 2, line)
    for i, (label, names) in enumerate(report.seeds.items()):
        shown = [spread(report.over_seeds(label, t)) for t in (*tasks, None)]
        rows.append(row([f"{label} ({counted(len(names), 'seed')})", *shown], kind="" if i else "first"))
    for i, (label, key) in enumerate((("Chance", "chance"), ("Majority label", "majority"))):
        values = [report.of_task(t)[key] for t in tasks]
        shown = [percent(v) for v in (*values, sum(values) / len(values))]
        rows.append(row([label, *shown], kind="quiet" if i else "quiet first"))
    head = ["Model", *(report.of_task(t)["title"] for t in tasks), "Mean"]
    return section("Accuracy", table(head, rows, _results_caption(report)), _figure(report))


def _results_caption(report: Report) -> str:
    caption = (
        "Per cent, with 95 % intervals; bold: best of a column. Tasks: Wilson's interval; those with groups "
        "are the mean over them. Mean: the tasks' intervals combined as of independent tasks."
    )
    if any(task in m.unreadable for m in report.models for task in report.tasks):
        caption += f" {UNREADABLE.capitalize()}: the result's file cannot be trusted; the end says why."
    if report.seeds:
        caption += " Seeds: mean ± standard deviation."
    if report.baseline:
        caption += f" ↑ ↓: surely better or worse than {report.baseline} on the same rows; see below."
    if report.other_baselines:
        caption += f" Another baseline: --baseline NAME ({report.other_baselines})."
    return caption


def _figure(report: Report) -> Markup:
    def point(model: Model, task: str) -> plots.Point | None:
        r = report.row(model.name, task)
        return None if r is None else (r["accuracy"], r["low"], r["high"])

    panels = [
        (report.of_task(t)["title"], [point(m, t) for m in report.models], report.of_task(t)["chance"])
        for t in report.tasks
    ]
    if len(report.tasks) > 1:
        means = [report.mean(m) for m in report.models]
        shown = [None if m is None else (m[0], m[1].low, m[1].high) for m in means]
        if any(shown):
            chance = sum(report.of_task(t)["chance"] for t in report.tasks) / len(report.tasks)
            panels.insert(0, ("Mean", shown, chance))
    names = [m.name for m in report.models]
    caption = "Accuracy (%) with its 95 % interval. Dotted line: chance."
    if len(names) > 1:
        caption = "Accuracy (%) with its 95 % interval; every panel has its own scale. "
        caption += "Dotted line: chance, where it is near."
    if report.baseline:
        caption += f" Solid line: {report.baseline}, the baseline."
    wide, narrow = (plots.accuracy_figure(panels, names, width) for width in (WIDE, NARROW))
    return figure(wide, narrow, caption)


def _differences(report: Report, baseline: str) -> Markup:
    """Differences from a baseline with their tests."""
    comparisons = report.against[baseline]

    def cell(model: Model, task: str | None) -> str:
        found = report.compared(model.name, task, baseline)
        if found is None:
            refused = comparisons[model.name].refused
            return "not comparable" if task in refused or (task is None and refused) else DASH
        kind = {1: "up", -1: "down", 0: ""}[found["direction"]]
        mark = tag("span", f"\u00a0{arrow(found['direction'])}", class_=kind) if kind else ""
        low, high = found["interval"]["low"], found["interval"]["high"]
        p = found["p"] if task is None else found["p_holm"]
        below = tag("span", span(low, high, signed=True), class_="ci")
        return join(points(found["difference"]), mark, below, tag("span", f"p {p_value(p)}", class_="ci"))

    def line(number: int, model: Model, base: str) -> Markup:
        first = name(number, model, base, baseline)
        columns = (*report.tasks, None)
        if model.name not in comparisons:
            return row([first, *("" if model.name == baseline else DASH for _ in (*columns, "sure"))])
        sure = [
            tag("span", f"{len(tasks)} {word}", class_=kind)
            for direction, word, kind in ((1, "gained", "up"), (-1, "lost", "down"))
            if (tasks := comparisons[model.name].surely(direction))
        ]
        return row([first, *(cell(model, task) for task in columns), Markup(", ".join(sure)) or DASH])

    rows = _by_base(report, len(report.tasks) + 3, line)
    head = ["Model", *(report.of_task(t)["title"] for t in report.tasks), "Mean", "Tasks"]
    caption = (
        "Points, with 95 % intervals (Bonett and Price) and p-values: for tasks of the exact McNemar test, "
        "after Holm's correction over the tasks; for the mean of random signs on the rows that one alone "
        f"gets right. ↑ ↓: p < {ALPHA} and an interval without zero. Tasks: how many were surely "
        "gained or lost."
    )
    reasons = [
        tag("li", f"{c.model}, {report.of_task(task)['title']}: {reason}")
        for c in comparisons.values()
        for task, reason in c.refused.items()
    ]
    notes = join(tag("p", "Not comparable:"), tag("ul", *reasons, class_="plain")) if reasons else ""
    drawing = _changes(report, baseline)
    return section(f"Difference from {baseline}", table(head, rows, caption), drawing, notes)


def _changes(report: Report, baseline: str) -> Markup:
    """What was gained and lost since a baseline, task by task, as a figure."""
    drawn = []
    for task in (*([None] if len(report.tasks) > 1 else []), *report.tasks):
        title = "Mean" if task is None else report.of_task(task)["title"]
        for number, model in enumerate(report.models):
            found = report.compared(model.name, task, baseline)
            if found is not None:
                limits = (found["difference"], found["interval"]["low"], found["interval"]["high"])
                drawn.append(Shift(title, number, *(100 * x for x in limits)))
    if not drawn:
        return Markup()
    unit = f"points from {shortened_name(baseline)} (left of zero: worse, right: better)"
    figure_name = f"changes-{list(report.against).index(baseline)}"
    wide, narrow = (shifts_figure(drawn, unit, w, figure_name, "Gained and lost") for w in (WIDE, NARROW))
    named = {shift.number for shift in drawn}
    names = [(css_colour(i), m.name) for i, m in enumerate(report.models) if i in named]
    return figure(wide, narrow, "Paired by row, with 95 % intervals.", legend(names))


def _scores(report: Report) -> Markup:
    if not report.rows:
        return Markup()
    checked = any(r["trained_on"] is not None for r in report.rows)
    columns = ["macro F1", "clean", "leaked", "shortened", *(["trained on", "without"] if checked else [])]
    rows = []
    for task in report.tasks:
        for i, r in enumerate(r for r in report.rows if r["task"] == task):
            shares = [percent(r.get(s)) for s in report.scores]
            shown = [
                tag("b", x) if s == r["score"] else x for s, x in zip(report.scores, shares, strict=True)
            ]
            cells = ["" if i else r["title"], r["model"], f"{r['n']:,}", *shown]
            cells += [percent(r["macro_f1"]), percent(r["clean_accuracy"]), f"{r['leaked']:,}", shortened(r)]
            if checked:
                known = r["trained_on"] is not None
                cells += [f"{r['trained_on']:,}" if known else DASH, percent(r["untrained_accuracy"])]
            rows.append(row(cells, kind="" if i or len(report.models) == 1 else "first", text=2))
    head = ["Task", "Model", "n", *(SCORE_TITLES[s] for s in report.scores), *columns]
    caption = "Accuracy in per cent; bold: the score used above."
    text = SCORES_TEXT + (OVERLAP_TEXT if checked else "")
    return section("Scores side by side", tag("p", text), table(head, rows, caption, text=2))


def _training(report: Report) -> Markup:
    logs = [(i, m) for i, m in enumerate(report.everyone) if m.metrics]
    if not logs:
        return Markup()
    wide, narrow = (plots.training_figure([(i, m.metrics) for i, m in logs], w) for w in (WIDE, NARROW))
    if not wide:
        return Markup()
    caption = "Lines: training batches; open circles: validation. Recorded whatever the objective minimises."
    return section(
        "Training", figure(wide, narrow, caption, legend((css_colour(i), m.name) for i, m in logs))
    )


def _scaling(report: Report) -> Markup:
    """Accuracy over training, where a run has several evaluated checkpoints."""
    series, unit = _over_training(report, "tokens"), "tokens"
    if not series:
        series, unit = _over_training(report, "step"), "steps"
    if not series:
        return Markup()
    wide, narrow = (plots.scaling_figure(list(series.values()), unit, width) for width in (WIDE, NARROW))
    titles = [(css_colour(i), Path(run).name) for i, run in enumerate(series)]
    caption = "Mean accuracy over the tasks; the band is its 95 % interval."
    return section("Accuracy over training", figure(wide, narrow, caption, legend(titles)))


def _over_training(report: Report, key: str) -> dict[str, list[plots.Stage]]:
    """Run -> mean accuracies of its checkpoints, where there are two and each says at what `key` it is."""
    runs: dict[str, list[tuple[object, plots.Point]]] = {}
    for model in report.models:
        mean = report.mean(model)
        if model.facts.get("run") and mean is not None:
            found = (mean[0], mean[1].low, mean[1].high)
            runs.setdefault(str(model.facts["run"]), []).append((model.facts.get(key), found))
    series = {run: [(float(x), *y) for x, y in found if isinstance(x, int)] for run, found in runs.items()}
    return {run: points for run, points in series.items() if len(points) == len(runs[run]) > 1}
