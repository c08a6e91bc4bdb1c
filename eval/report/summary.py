"""The report's tables as Markdown, for a pull request or a terminal."""

from __future__ import annotations

from common.text import counted
from common.text import markdown as plain
from eval.compare import ALPHA
from eval.report import judged
from eval.report.gather import Report
from eval.report.numbers import (
    UNREADABLE,
    arrow,
    markdown_head,
    markdown_row,
    p_value,
    percent,
    points,
    span,
    spread,
)
from eval.report.order import method

DETAILS = (
    "macro_f1",
    "clean_accuracy",
    "leaked",
    "trained_on",
    "untrained_accuracy",
    "rows_shortened",
    "rows_cut",
)


def markdown(report: Report) -> str:
    """The main tables."""
    lines = [f"# {plain(report.title)}", ""]
    if report.notice:
        lines += [f"> {plain(report.notice)}", ""]
    if report.remarks:
        lines += [*(f"- {plain(remark)}" for remark in report.remarks), ""]
    if report.rows:
        lines += _accuracy(report)
        lines += [line for first in report.against for line in _differences(report, first)]
        lines += _details(report)
    lines += judged.markdown(report.judgements, report.pairings)
    lines += ["", "## Made with", "", *(f"- {plain(k)}: {plain(v)}" for k, v in report.metadata.items())]
    lines += [f"- {plain(line)}" for line in report.skipped]
    return "\n".join(lines) + "\n"


def _accuracy(report: Report) -> list[str]:
    lines = ["Accuracy in per cent", "", *markdown_head(["base model", "model", *_titles(report), "mean"])]
    for base, models in report.groups:
        for model in models:
            cells = [_name(report, base, model.name, method(model, base))]
            for task in report.tasks:
                r = report.row(model.name, task)
                mark = arrow(report.direction(model.name, task))
                shown = percent(None if r is None else r["accuracy"])
                shown = UNREADABLE if task in model.unreadable else shown
                cells.append(f"{shown} {mark}".strip())
            mean = report.mean(model)
            mark = arrow(report.direction(model.name, None))
            cells.append(f"{percent(None if mean is None else mean[0])} {mark}".strip())
            lines.append(markdown_row([base, *cells]))
    for label, names in report.seeds.items():
        found = [spread(report.over_seeds(label, t)) for t in (*report.tasks, None)]
        lines.append(markdown_row(["", f"{label} ({counted(len(names), 'seed')})", *found]))
    for name in ("chance", "majority"):
        values = [report.of_task(t)[name] for t in report.tasks]
        lines.append(markdown_row(["", name, *map(percent, [*values, sum(values) / len(values)])]))
    return lines


def _name(report: Report, base: str, name: str, title: str) -> str:
    shown = name if title == name else f"{title} ({name})"
    return f"{shown}, baseline" if name == report.baseline else shown


def _differences(report: Report, baseline: str) -> list[str]:
    lines = ["", f"## Difference from {plain(baseline)}", ""]
    lines += markdown_head(
        ["model", "task", "points", "95 % interval", "only baseline", "only model", "p", "p Holm"]
    )
    for c in report.against[baseline].values():
        for task, x in c.tasks.items():
            shown = [points(x["difference"]), span(x["interval"]["low"], x["interval"]["high"], signed=True)]
            shown += [str(x["only_a"]), str(x["only_b"]), p_value(x["p_mcnemar"]), p_value(x["p_holm"])]
            shown[-1] += f" {arrow(x['direction'])}" if x["direction"] else ""
            lines.append(markdown_row([c.model, report.of_task(task)["title"], *shown]))
        for task, reason in c.refused.items():
            lines.append(
                markdown_row([c.model, report.of_task(task)["title"], f"not comparable: {reason}", *[""] * 5])
            )
        mean = report.compared(c.model, None, baseline)
        if mean is not None:
            interval = span(mean["interval"]["low"], mean["interval"]["high"], signed=True)
            p = f"{p_value(mean['p'])} {arrow(mean['direction'])}".strip()
            lines.append(markdown_row([c.model, "mean", points(mean["difference"]), interval, "", "", p, ""]))
    return [
        *lines,
        "",
        f"↑ ↓: p < {ALPHA} and an interval without zero (tasks: exact McNemar, Holm over the tasks; "
        "mean: random signs).".replace("<", "&lt;"),
    ]


def _details(report: Report) -> list[str]:
    head = ["model", "task", "n", "accuracy", "95 % interval", *report.scores, *DETAILS]
    head += ["prompts", "shots", "retriever"]
    lines = ["", "## Details", "", *markdown_head(head)]
    for r in report.rows:
        shares = [percent(r.get(name)) for name in report.scores]
        rest = [str(r[c]) if isinstance(r[c], int) else percent(r[c]) for c in DETAILS]
        asked = [str(r[name]) for name in ("prompt", "shots", "retriever")]
        first = [r["model"], r["title"], str(r["n"]), percent(r["accuracy"]), span(r["low"], r["high"])]
        lines.append(markdown_row([*first, *shares, *rest, *asked]))
    return lines


def _titles(report: Report) -> list[str]:
    return [report.of_task(t)["title"] for t in report.tasks]
