"""The report as one HTML file: no scripts, no external files, readable from disk in light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from eval.compare import ALPHA, Model
from eval.report import plots
from eval.report.gather import Report, mean_accuracy, percent, spread

SCORE_TITLES = {
    "openicl_ppl": "whole-prompt perplexity",
    "suffix_sum": "label likelihood",
    "suffix_mean": "label likelihood per token",
    "channel": "channel",
    "calibrated": "calibrated",
}
SAMPLES_SHOWN = 4
CONFUSION_LABELS = 8  # larger matrices are in results.json only


def html(report: Report) -> str:
    """The whole page."""
    style = (Path(__file__).parent / "page.css").read_text()
    notice = (
        f'<div class="notice"><strong>Note</strong>{escape(report.notice)}</div>' if report.notice else ""
    )
    sections = [
        _results(report),
        _figure(report),
        _scores(report),
        _training(report),
        _scaling(report),
        _samples(report),
        _confusions(report),
        _worst(report),
        _made_with(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(report.title)}</h1>\n<p class='lead'>{_lead(report)}</p>\n{notice}\n"
        + "\n".join(s for s in sections if s)
        + "\n</body>\n</html>\n"
    )


def _lead(report: Report) -> str:
    rows = sum(r["n"] for r in report.rows if r["model"] == report.models[0].name)
    kinds = sorted({(r["shots"], r["retriever"]) for r in report.rows})
    how = "; ".join(f"{shots} demonstrations ({escape(str(by))})" for shots, by in kinds)
    return (
        f"{_count(len(report.models), 'model')}, {_count(len(report.tasks), 'task')}, "
        f"{rows:,} test rows per model. "
        f"Demonstrations per prompt: {how}. Scored through OpenICL."
    )


def _results(report: Report) -> str:
    if not report.rows:
        return ""
    tasks = report.tasks
    head = _tr(["Model", *(_title(report, t) for t in tasks), "Mean"], cell="th")
    best = {t: max(r["accuracy"] for r in report.rows if r["task"] == t) for t in tasks}
    means = {m.name: mean_accuracy(report, m) for m in report.models}
    top = max((x for x in means.values() if x is not None), default=None)
    lines = []
    for number, model in enumerate(report.models):
        cells = [_name(number, model)]
        for task in tasks:
            row = report.row(model.name, task)
            value = percent(row)
            if row is not None and row["accuracy"] == best[task]:
                value = f"<b>{value}</b>"
            mark = {1: ' <span class="up">↑</span>', -1: ' <span class="down">↓</span>', 0: ""}
            interval = "" if row is None else _interval(row)
            cells.append(f"{value}{mark[report.significant(model.name, task)]}{interval}")
        mean = means[model.name]
        shown = "\u2013" if mean is None else f"{100 * mean:.1f}"
        cells.append(f"<b>{shown}</b>" if mean is not None and mean == top else shown)
        lines.append(_tr(cells))
    for i, (label, names) in enumerate(report.seeds.items()):
        cells = [spread(report.over_seeds(label, t)) for t in (*tasks, None)]
        lines.append(_tr([f"{escape(label)} ({len(names)} seeds)", *cells], kind="" if i else "first"))
    chance = [report.of_task(t)["chance"] for t in tasks]
    shares = [report.of_task(t)["majority"] for t in tasks]
    for label, values, kind in (("chance", chance, "quiet first"), ("majority label", shares, "quiet")):
        lines.append(
            _tr([label, *(f"{100 * v:.1f}" for v in (*values, sum(values) / len(values)))], kind=kind)
        )
    caption = "Per cent, with 95 % bootstrap intervals; bold: best of a column. MMLU: mean over subjects."
    if report.seeds:
        caption += " Seeds: mean ± standard deviation."
    if report.baseline:
        caption += (
            f" ↑ ↓: differs from {escape(report.baseline)} on the same rows "
            f"(exact McNemar test, Holm's correction over the tasks, p &lt; {ALPHA})."
        )
    return f"<h2>Accuracy</h2>{_table(head, lines, caption)}"


def _interval(row: dict[str, Any]) -> str:
    return f'<span class="ci">{100 * row["low"]:.0f}&ndash;{100 * row["high"]:.0f}</span>'


def _figure(report: Report) -> str:
    if not report.rows:
        return ""
    cells = {
        (t, m): row
        for t, task in enumerate(report.tasks)
        for m, model in enumerate(report.models)
        if (row := report.row(model.name, task)) is not None
    }
    chance = [report.of_task(t)["chance"] for t in report.tasks]
    titles = [report.of_task(t)["title"] for t in report.tasks]
    figure = plots.accuracy_figure(titles, [m.name for m in report.models], cells, chance)
    return f"<figure>{figure}</figure>"


def _scores(report: Report) -> str:
    if not report.rows:
        return ""
    checked = any(r["trained_on"] is not None for r in report.rows)
    columns = ["macro F1", "clean", "leaked", "shortened", *(["trained on", "without"] if checked else [])]
    head = _tr(["Task", "Model", "n", *(SCORE_TITLES[s] for s in report.scores), *columns], cell="th", text=2)
    lines = []
    for task in report.tasks:
        for i, row in enumerate(r for r in report.rows if r["task"] == task):
            shares = [percent(row, s) for s in report.scores]
            shares = [
                f"<b>{x}</b>" if s == row["score"] else x for s, x in zip(report.scores, shares, strict=True)
            ]
            cells = ["" if i else escape(row["title"]), escape(row["model"]), f"{row['n']:,}", *shares]
            cells += [
                percent(row, "macro_f1"),
                percent(row, "clean_accuracy"),
                f"{row['leaked']:,}",
                _shortened(row),
            ]
            if checked:
                known = row["trained_on"] is not None
                cells += [f"{row['trained_on']:,}" if known else "\u2013", percent(row, "untrained_accuracy")]
            lines.append(_tr(cells, text=2))
    text = (
        "Several ways to turn the same forward pass into a decision. Whole-prompt perplexity divides by the "
        "prompt's length, so every further token of a label earns the model's mean loss: labels of unequal "
        "length are favoured differently by models of unequal perplexity. The label likelihoods count the "
        "label's tokens only. <i>Clean</i> leaves out test rows whose text stands verbatim among the rows "
        "that demonstrations come from (<i>leaked</i>); <i>shortened</i> counts rows whose prompts lost "
        "demonstrations, and in brackets those that lost text of the query, to fit the model's context."
    )
    if checked:
        text += (
            " <i>Trained on</i> counts test rows that share long word sequences with the training text, as "
            "data preparation found them; <i>without</i> is the accuracy on the others."
        )
    caption = "Accuracy in per cent; bold: the score used above."
    return f"<h2>Scores side by side</h2><p>{text}</p>{_table(head, lines, caption)}"


def _shortened(row: dict[str, Any]) -> str:
    cut = f" ({row['rows_cut']:,})" if row["rows_cut"] else ""
    return f"{row['rows_shortened']:,}{cut}"


def _training(report: Report) -> str:
    logs = {m.name: (i, m.metrics) for i, m in enumerate(report.models) if m.metrics}
    if not logs:
        return ""
    caption = "Lines: training batches; open circles: validation. Recorded whatever the objective minimises."
    return f"<h2>Training</h2>{_with_caption(plots.training_figure(logs), caption)}"


def _scaling(report: Report) -> str:
    """Accuracy over training, where a run has several evaluated checkpoints."""
    series: dict[str, list[Model]] = {}
    for model in report.models:
        if model.facts.get("run") and mean_accuracy(report, model) is not None:
            series.setdefault(str(model.facts["run"]), []).append(model)
    series = {name: models for name, models in series.items() if len(models) > 1}
    if not series:
        return ""
    unit = "tokens" if all(m.facts.get("tokens") for models in series.values() for m in models) else "steps"
    points = {
        Path(name).name: [
            (m.facts[unit.removesuffix("s") if unit == "steps" else unit], *_mean_interval(report, m))
            for m in models
        ]
        for name, models in series.items()
    }
    figure = plots.scaling_figure(points, unit)
    caption = "Mean accuracy over the tasks; the band is its 95 % bootstrap interval."
    return f"<h2>Accuracy over training</h2>{_with_caption(figure, caption)}"


def _mean_interval(report: Report, model: Model) -> tuple[float, float, float]:
    """Mean accuracy over tasks with its interval: half-widths of independent tasks add in squares."""
    rows = [row for task in report.tasks if (row := report.row(model.name, task)) is not None]
    mean = sum(r["accuracy"] for r in rows) / len(rows)
    half = sum(((r["high"] - r["low"]) / 2) ** 2 for r in rows) ** 0.5 / len(rows)
    return mean, mean - half, mean + half


def _samples(report: Report) -> str:
    if not any(m.samples for m in report.models):
        return ""
    cards = []
    for number, model in enumerate(report.models):
        quotes = [
            f"<blockquote><i>{escape(s['prefix'])}</i>{escape(s['text'])}"
            f"{'' if s['ended'] else ' …'}</blockquote>"
            for s in model.samples[:SAMPLES_SHOWN]
        ]
        if quotes:
            cards.append(f"<div><h3>{_name(number, model)}</h3>{''.join(quotes)}</div>")
    text = (
        "Sampled without truncation (top-k 0, top-p 1, temperature 1); the first of each model, none picked."
    )
    return f"<h2>What the models write</h2><p>{text}</p><div class='cards'>{''.join(cards)}</div>"


def _confusions(report: Report) -> str:
    blocks = []
    for task in report.tasks:
        tables = []
        for number, model in enumerate(report.models):
            result = model.results.get(task)
            if result is None or len(result["labels"]) > CONFUSION_LABELS:
                continue
            tables.append(_confusion(number, model.name, result))
        if tables:
            blocks.append(_details(_title(report, task), f"<div class='confusions'>{''.join(tables)}</div>"))
    if not blocks:
        return ""
    text = "Rows: the right label. Columns: the prediction. Shading: share of the row."
    return f"<h2>Confusion</h2><p>{text}</p>{''.join(blocks)}"


def _confusion(number: int, model: str, result: dict[str, Any]) -> str:
    labels, counts = result["labels"], result["confusion"]
    head = "".join(f"<th title='{escape(x)}'>{escape(x)}</th>" for x in labels)
    body = []
    for label, row in zip(labels, counts, strict=True):
        total = max(sum(row), 1)
        cells = "".join(f"<td style='--v:{x / total:.3f}'>{x}</td>" for x in row)
        body.append(f"<tr><th title='{escape(label)}'>{escape(label)}</th>{cells}</tr>")
    return (
        f"<table class='confusion' style='--c:var(--s{number % 6 + 1})'><caption>{escape(model)}</caption>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _worst(report: Report) -> str:
    blocks = []
    for task in report.tasks:
        for model in report.models:
            samples = model.results.get(task, {}).get("worst", [])
            if samples:
                title = f"{escape(model.results[task]['title'])} · {escape(model.name)}"
                blocks.append(
                    f"<details><summary>{title}</summary>{''.join(map(_sample, samples))}</details>"
                )
    if not blocks:
        return ""
    text = (
        "For each task and model the wrong answers whose right label lost by most, with the demonstrations "
        "the model saw (most similar first) and the score of every label; the smallest wins."
    )
    return f"<h2>Worst mistakes</h2><p>{text}</p>{''.join(blocks)}"


def _sample(sample: dict[str, Any]) -> str:
    cells = []
    for label, value in sample["scores"].items():
        kind = "up" if label == sample["gold"] else "down" if label == sample["prediction"] else ""
        cells.append(f"<tr><td class='{kind}'>{escape(label)}</td><td>{value:.4f}</td></tr>")
    shown = "".join(
        f"<li>{escape(d['text'])} <b>{escape(d['label'])}</b></li>" for d in sample["demonstrations"]
    )
    return (
        f"<div class='sample'><pre>{escape(sample['text'])}</pre>"
        f"<div class='small'>row {sample['row']}: <span class='up'>{escape(sample['gold'])}</span>, "
        f"answered <span class='down'>{escape(sample['prediction'])}</span></div>"
        f"<table>{''.join(cells)}</table><ol>{shown}</ol></div>"
    )


def _made_with(report: Report) -> str:
    lines = []
    for number, model in enumerate(report.models):
        facts = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in model.facts.items())
        lines.append(
            f"<dt>{_name(number, model)}</dt><dd>{escape(model.description['path'])}"
            f"{escape('; ' + facts if facts else '')}; weights {model.description['weights'][:16]}</dd>"
        )
    lines += [f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in report.metadata.items()]
    return f"<h2>Made with</h2><dl>{''.join(lines)}</dl>"


def _title(report: Report, task: str) -> str:
    return escape(report.of_task(task)["title"])


def _name(number: int, model: Model) -> str:
    return f'<span class="chip" style="background:var(--s{number % 6 + 1})"></span>{escape(model.name)}'


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _with_caption(figure: str, caption: str) -> str:
    return f"<figure>{figure}<figcaption>{caption}</figcaption></figure>"


def _table(head: str, lines: Iterable[str], caption: str) -> str:
    body = "".join(lines)
    table = f"<caption>{caption}</caption><thead>{head}</thead><tbody>{body}</tbody>"
    return f"<div class='scroll'><table>{table}</table></div>"


def _tr(cells: Iterable[str], cell: str = "td", kind: str = "", text: int = 1) -> str:
    """A table row; the first `text` cells are words, the others numbers."""
    inner = "".join(f"<{cell}{' class=text' if i < text else ''}>{c}</{cell}>" for i, c in enumerate(cells))
    return f"<tr{f' class={kind!r}' if kind else ''}>{inner}</tr>"
