"""The report of evaluated models, as a document: which is better, by how much, and the rows behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.report.document import Block, Cell, Document, Fold, Items, Quote, Section, Table
from common.report.figure import Curve, Curves, Dot, Dots, Figure, pairs
from common.report.numbers import (
    DASH,
    Effect,
    between,
    changes,
    difference,
    p_value,
    percent,
    points,
    sentence,
    shown,
)
from common.text import counted
from eval.report import judged
from eval.report.gather import Report, as_json
from eval.report.order import OBJECTIVES
from eval.results import Model

FILES = ("report.html", "report.md", "results.json")
UNREADABLE = "unreadable"  # in the place of a number whose file is there and cannot be trusted
SAMPLES_SHOWN, CONFUSION_LABELS, NAMES_SHOWN = 4, 8, 6
TONES = {1: "better", -1: "worse", 0: "unclear"}
SCORES = {
    "openicl_ppl": ("whole-prompt perplexity", "nats per token of the whole prompt"),
    "suffix_sum": ("label likelihood", "nats of the label"),
    "suffix_mean": ("label likelihood per token", "nats per token of the label"),
    "channel": ("channel", "nats of the text, given the label"),
    "calibrated": ("calibrated", "nats of the label, less those without the text"),
}
# Condition of a result -> how the settings' table calls it.
SETTINGS = {
    "prompt_version": "Prompts",
    "shots": "Shots",
    "retriever": "Retriever",
    "score": "Score",
    "inferencer": "Inferencer",
    "faithful": "Faithful",
    "max_tokens": "Longest prompt",
    "dtype": "Dtype",
    "scorer": "Scorer",
    "test_rows": "Test rows",
    "pool_rows": "Pool rows",
    "prompt": "Prompt text",
}
DETAILS = (
    "Accuracy in per cent, by several ways to turn the same forward pass into a decision; the one that decides is in "
    "bold. Whole-prompt perplexity divides by the prompt's length, which favours long labels for a model that is bad "
    "at the text; label likelihoods count the label's tokens alone. Clean: without test rows whose text is also among "
    "the rows that demonstrations come from (leaked). Shortened: prompts that lost demonstrations to the context, and "
    "in brackets parts of the query. Trained on: test rows that share long passages with the training text, and the "
    "accuracy without them."
)


def document(report: Report) -> Document:
    """Return the report."""
    sections = [
        Section("Accuracy", _accuracy(report)),
        *(Section(f"Difference from {first}", _differences(report, first)) for first in report.against),
        Section("Training", _training(report)),
        Section("Accuracy over training", _over_training(report)),
        *judged.sections(report.judgements, report.pairings),
        Section("Details", _details(report)),
        Section("What the models write", _samples(report), page_only=True),
        Section("Confusion", _confusions(report), page_only=True),
        Section("Worst mistakes", _worst(report), page_only=True),
        Section("Settings", _settings(report), page_only=True),
        Section("Made with", _made_with(report)),
    ]
    answer = [*_answer(report), *judged.answers(report.judgements)] or [
        "No task was scored and no answer judged."
    ]
    picture = _picture(report) or judged.picture(report.judgements)
    data = as_json(report) | {"answer": answer}
    about = f"{report.title}. {_about(report)}"
    return Document(report.title, answer, about, sections, picture, report.remarks, report.notice, data)


def other_baselines(report: Report) -> str:
    """Return what --baseline could name instead, where nobody chose; else nothing."""
    names = [m.name for m in report.models if m.name != report.baseline]
    if report.baseline is None or report.chosen:
        return ""
    return ", ".join([*names[:NAMES_SHOWN], *(["..."] if len(names) > NAMES_SHOWN else [])])


def effect(name: str, found: dict[str, Any]) -> Effect:
    """Return a comparison in percentage points."""
    values = (found["difference"], found["interval"]["low"], found["interval"]["high"])
    return Effect(name, *(100 * x for x in values), found["direction"])


def _answer(report: Report) -> list[str]:
    """Return what the comparisons say, base by base; without any, how good the models are."""
    said: list[str] = []
    for family in report.families:
        names = {m.name for m in family.members}
        clauses = []
        for first, found in report.against.items():
            compared = [(c, c.mean) for c in found.values() if c.mean is not None]
            if first not in names or not compared:
                continue
            effects = [effect(c.model, mean) for c, mean in compared]
            on = {len(c.tasks) for c, _ in compared}
            tasks = counted(on.pop(), "task") if len(on) == 1 else "the tasks in common"
            if clauses and len(effects) == 1:
                clauses.append(difference(effects[0], first, "points"))
            else:
                clauses.append(f"compared with {first} on {tasks}, {changes(effects, 'points')}")
        if clauses:
            text = "; ".join(clauses)
            said.append(sentence(text[0].upper() + text[1:]))
    if not said:
        for model in report.models:
            if (mean := report.mean(model)) is not None:
                chance = sum(report.of_task(t)["chance"] for t in report.tasks) / len(report.tasks)
                interval = f"95 % interval {between(mean[1].low, mean[1].high, scale=100)}"
                over = "" if len(report.tasks) == 1 else f", the mean of {len(report.tasks)} tasks,"
                said.append(
                    f"{model.name}: accuracy{over} {percent(mean[0])} % ({interval}); chance is {percent(chance)} %."
                )
    lacking = [f for f in report.families if f.title and f.base is None and not report.chosen]
    said += [
        f"{f.title}, which {counted(len(f.members), 'model')} began from, was not evaluated." for f in lacking
    ]
    return said


def _about(report: Report) -> str:
    if not report.rows:
        return (
            f"{counted(len(report.judgements), 'comparison')} of answers by judges."
            if report.judgements
            else ""
        )
    rows = max(sum(r["n"] for r in report.rows if r["model"] == m.name) for m in report.models)
    kinds = sorted({(r["shots"], str(r["retriever"])) for r in report.rows})
    how = "; ".join(f"{shots} ({by})" for shots, by in kinds)
    return (
        f"{counted(len(report.models), 'model')}, {counted(len(report.tasks), 'task')}, {rows:,} test rows per model; "
        f"demonstrations in a prompt: {how}."
    )


def _picture(report: Report) -> Figure | None:
    """Return the mean differences from the bases, or else the mean accuracies."""
    number = {m.name: i for i, m in enumerate(report.models)}
    panels = []
    for first, found in report.against.items():
        effects = [(c.model, effect(c.model, c.mean)) for c in found.values() if c.mean is not None]
        rows = [Dot(name, number[name], *e[1:4]) for name, e in effects]
        panels += [Dots(f"Points from {first}, mean over tasks", rows, 0.0)] if rows else []
    caption = "With 95 % intervals, paired by test row. Right of the dotted line: better."
    if panels:
        return Figure("Mean differences", panels, caption)
    return _dots(report, "Mean accuracy", [None]) if report.rows else None


def _dots(report: Report, label: str, tasks: Sequence[str | None]) -> Figure | None:
    """Return accuracies, a panel for each task; None stands for their mean."""
    panels = []
    for task in tasks:
        rows, chances = [], [report.of_task(t)["chance"] for t in ([task] if task else report.tasks)]
        for i, model in enumerate(report.models):
            r = report.row(model.name, task) if task else None
            mean = None if task else report.mean(model)
            limits = (
                (r["accuracy"], r["low"], r["high"])
                if r
                else (mean[0], mean[1].low, mean[1].high)
                if mean
                else None
            )
            rows += [Dot(model.name, i, *(100 * x for x in limits))] if limits else []
        title = report.of_task(task)["title"] if task else "Mean over tasks"
        panels += [Dots(title, rows, 100 * sum(chances) / len(chances))] if rows else []
    caption = "Accuracy in per cent with 95 % intervals; every panel has its own scale. Dotted line: chance, where it is near."
    return Figure(label, panels, caption) if panels else None


def _heading(report: Report, model: Model) -> Cell:
    """Return a model as rows call it, with what it is."""
    number = next(i for i, m in enumerate(report.everyone) if m is model)
    family = next((f for f in report.families if model in f.members), None)
    objective = str(model.facts.get("objective") or "")
    notes = ["base model"] if family and family.base is model else []
    if objective and objective.lower() not in model.name.lower():
        notes.append(OBJECTIVES.get(objective, objective))
    if len(report.families) > 1 and family and family.title and family.base is not model:
        notes.append(f"from {family.title}")
    return Cell(model.name, ", ".join(notes), mark=number)


def _accuracy(report: Report) -> list[Block]:
    if not report.rows:
        return []
    several = len(report.tasks) > 1
    columns: list[str | None] = [*([None] if several else []), *report.tasks]

    def cell(model: Model, task: str | None) -> Cell:
        r = report.row(model.name, task) if task else None
        mean = None if task else report.mean(model)
        if r is None and mean is None:
            return Cell(UNREADABLE, tone="worse") if task in model.unreadable else Cell(DASH)
        value, low, high = (r["accuracy"], r["low"], r["high"]) if r else (mean[0], mean[1].low, mean[1].high)  # type: ignore[index]
        tone = TONES[report.direction(model.name, task)]
        return Cell(percent(value), between(low, high, scale=100), "" if tone == "unclear" else tone)

    rows: list[Sequence[Cell | str]] = [
        [_heading(report, m), *(cell(m, t) for t in columns)] for m in report.models
    ]
    for label, names in report.seeds.items():
        spreads = [report.over_seeds(label, t) for t in columns]
        texts = [
            DASH if s is None else percent(s[0]) if s[1] is None else f"{percent(s[0])} ± {percent(s[1])}"
            for s in spreads
        ]
        rows.append([f"{label} ({counted(len(names), 'seed')}, mean ± standard deviation)", *texts])
    for label, key in (("Chance", "chance"), ("Majority label", "majority")):
        values = [report.of_task(t)[key] for t in report.tasks]
        shares = [sum(values) / len(values)] * several + values
        rows.append([Cell(label, tone="quiet"), *(Cell(percent(v), tone="quiet") for v in shares)])
    caption = "Per cent, with 95 % intervals (Wilson's; the mean's as of independent tasks)."
    if report.against:
        caption += " ↑ and ↓: better or worse than what the model is first compared with below, by test and interval."
    if other_baselines(report):
        caption += f" --baseline NAME compares with another ({other_baselines(report)})."
    if any(task in m.unreadable for m in report.models for task in report.tasks):
        caption += f" {UNREADABLE.capitalize()}: the result's file cannot be trusted; the end says why."
    head = ["Model", *("Mean" if t is None else report.of_task(t)["title"] for t in columns)]
    figure = _dots(report, "Accuracy", report.tasks)
    return [Table(head, rows, caption), *([figure] if figure else [])]


def _differences(report: Report, baseline: str) -> list[Block]:
    """Return differences from a baseline with their tests."""
    found = report.against[baseline]
    columns: list[str | None] = [*([None] if len(report.tasks) > 1 else []), *report.tasks]

    def cell(model: str, task: str | None) -> Cell:
        x = report.compared(model, task, baseline)
        if x is None:
            refused = found[model].refused
            return Cell(
                "not comparable" if task in refused or (task is None and refused) else DASH, tone="quiet"
            )
        interval = between(x["interval"]["low"], x["interval"]["high"], "{:+.1f}", 100)
        note = f"{interval}, {p_value(x['p'] if task is None else x['p_holm'])}"
        return Cell(points(x["difference"]), note, TONES[x["direction"]] if x["direction"] else "")

    rows, reasons = [], []
    for model in (m for m in report.models if m.name in found):
        c = found[model.name]
        direction = c.mean["direction"] if c.mean else 0
        word = {1: "better", -1: "worse", 0: "no clear difference"}[direction] if c.mean else "not comparable"
        tasks = [f"{len(c.surely(d))} {w}" for d, w in ((1, "better"), (-1, "worse")) if c.surely(d)]
        verdict = Cell(word, f"tasks: {', '.join(tasks)}" if tasks else "", TONES[direction])
        rows.append([_heading(report, model), verdict, *(cell(model.name, t) for t in columns)])
        reasons += [f"{c.model}, {report.of_task(t)['title']}: {reason}" for t, reason in c.refused.items()]
    caption = (
        "Percentage points with 95 % intervals (Bonett and Price), paired by test row. p-values: exact McNemar tests, "
        "corrected over the tasks by Holm's method; for the mean of random signs. The verdict is on the mean, and "
        "needs both a p-value below 0.05 and an interval without zero."
    )
    panels = []
    for task in report.tasks:
        dots = [
            Dot(m.name, i, *effect(m.name, x)[1:4])
            for i, m in enumerate(report.models)
            if (x := report.compared(m.name, task, baseline)) is not None
        ]
        panels += [Dots(report.of_task(task)["title"], dots, 0.0)] if dots else []
    head = ["Model", "Verdict", *("Mean" if t is None else report.of_task(t)["title"] for t in columns)]
    figure = Figure(f"Differences from {baseline}", panels, "Points; right of the dotted line: better.")
    notes = [Items(reasons, "Not comparable")] if reasons else []
    return [Table(head, rows, caption, 2), *([figure] if panels else []), *notes]


def _details(report: Report) -> list[Block]:
    if not report.rows:
        return []
    rows = []
    for r in (r for task in report.tasks for r in report.rows if r["task"] == task):
        scores = [Cell(percent(r.get(s)), tone="best" if s == r["score"] else "") for s in report.scores]
        cut = f" ({r['rows_cut']:,})" if r["rows_cut"] else ""
        cells = [
            r["title"],
            r["model"],
            shown(r["n"]),
            *scores,
            percent(r["macro_f1"]),
            percent(r["clean_accuracy"]),
        ]
        overlap = [shown(r["trained_on"]), percent(r["untrained_accuracy"])]
        rows.append([*cells, shown(r["leaked"]), f"{r['rows_shortened']:,}{cut}", *overlap])
    head = [
        "Task",
        "Model",
        "Rows",
        *(SCORES[s][0] for s in report.scores),
        "Macro F1",
        "Clean",
        "Leaked",
        "Shortened",
    ]
    return [Table([*head, "Trained on", "Without"], rows, DETAILS, 2)]


def _training(report: Report) -> list[Block]:
    logs = [(i, m) for i, m in enumerate(report.everyone) if m.metrics]
    panels = []
    for key, title in (("nll", "Loss in nats per token (NLL)"), ("demd", "Expected transport cost (DEMD)")):
        drawn = [
            (i, pairs(m.metrics, "tokens", key), pairs(m.metrics, "tokens", f"validation_{key}"))
            for i, m in logs
        ]
        curves = [Curve(i, line, marks) for i, line, marks in drawn if line or marks]
        panels += [Curves(title, curves, "tokens")] if curves else []
    caption = "Lines: training batches; circles: held-out data."
    return [Figure("Training", panels, caption, [(i, m.name) for i, m in logs])] if panels else []


def _over_training(report: Report) -> list[Block]:
    """Return the accuracy of runs that have several evaluated checkpoints, over tokens or else over steps."""
    runs: dict[str, list[tuple[Any, Any, tuple[float, float, float]]]] = {}
    for model in report.models:
        mean = report.mean(model)
        if model.facts.get("run") and mean is not None:
            limits = (100 * mean[0], 100 * mean[1].low, 100 * mean[1].high)
            runs.setdefault(str(model.facts["run"]), []).append(
                (model.facts.get("tokens"), model.facts.get("step"), limits)
            )
    for place, unit in ((0, "tokens"), (1, "steps")):
        known = {run: sorted((p[place], *p[2]) for p in found) for run, found in runs.items()
                 if len(found) > 1 and all(isinstance(p[place], int) for p in found)}  # fmt: skip
        curves = [
            Curve(i, [(x, y) for x, y, *_ in found], [], [(x, low, high) for x, _, low, high in found])
            for i, found in enumerate(known.values())
        ]
        if curves:
            names = [(i, Path(run).name) for i, run in enumerate(known)]
            caption = "Per cent; the band is the 95 % interval."
            return [Figure("Accuracy over training", [Curves("Mean accuracy", curves, unit)], caption, names)]
    return []


def _samples(report: Report) -> list[Block]:
    blocks: list[Block] = []
    for model in report.everyone:
        quotes = [
            Quote(s["text"] + ("" if s["ended"] else " …"), s["prefix"], "" if i else model.name)
            for i, s in enumerate(model.samples[:SAMPLES_SHOWN])
        ]
        blocks += quotes
    lead = "Sampled from the whole distribution (temperature 1); the first of each model, none picked."
    return [lead, *blocks] if blocks else []


def _confusions(report: Report) -> list[Block]:
    folds = []
    for task in report.tasks:
        tables = []
        for model in (m for m in report.models if task in m.results):
            result = model.results[task]
            rows = [
                [label, *(Cell(f"{n:,}", shade=n / max(sum(counts), 1)) for n in counts)]
                for label, counts in zip(result["labels"], result["confusion"], strict=True)
            ]
            if len(rows) <= CONFUSION_LABELS:
                tables.append(Table(["Right label", *result["labels"]], rows, label=model.name))
        folds += [Fold(report.of_task(task)["title"], tables)] if tables else []
    return (
        ["Rows: the right label; columns: the model's answer; shading: share of the row.", *folds]
        if folds
        else []
    )


def _worst(report: Report) -> list[Block]:
    """Return the wrong answers whose right label lost by most."""
    folds = []
    for task in report.tasks:
        for number, model in enumerate(report.models):
            result = model.results.get(task, {})
            blocks = [
                block for sample in result.get("worst", []) for block in _mistake(sample, result["score"])
            ]
            folds += [Fold(f"{result['title']}, {model.name}", blocks, number)] if blocks else []
    lead = (
        "The wrong answers whose right label lost by most, with the demonstrations that the model saw, most similar "
        "first, and the score of every label, of which the smallest wins. Rows are numbered as in the data, from 0."
    )
    return [lead, *folds] if folds else []


def _mistake(sample: dict[str, Any], score: str) -> list[Block]:
    gold, predicted = sample["gold"], sample["prediction"]
    roles = {gold: ("right answer", "better"), predicted: ("the model's answer", "worse")}
    rows = [
        [label, f"{value:.4f}", Cell(*roles.get(label, ("", ""))[:1], tone=roles.get(label, ("", ""))[1])]
        for label, value in sorted(sample["scores"].items(), key=lambda item: item[1])
    ]
    title = f"Data row {sample['id']}: {gold}, answered {predicted}"
    demonstrations = [f"{d['text']} → {d['label']}" for d in sample["demonstrations"]]
    table = Table(["Label", SCORES[score][1], ""], rows, label=title)
    return [
        Quote(sample["text"], title=title),
        table,
        *([Items(demonstrations, "Demonstrations")] if demonstrations else []),
    ]


def _settings(report: Report) -> list[Block]:
    """Return how each task was asked; models in one row were asked alike. What is alike everywhere is said once."""
    asked: list[tuple[str, str, dict[str, str]]] = []
    for task in report.tasks:
        kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for model in (m for m in report.models if task in m.results):
            kinds.setdefault(tuple(_conditions(model, task).items()), []).append(model.name)
        for values, names in kinds.items():
            asked.append(
                (report.of_task(task)["title"], "all" if len(kinds) == 1 else ", ".join(names), dict(values))
            )
    if not asked:
        return []
    differing = [key for key in asked[0][2] if len({values[key] for *_, values in asked}) > 1]
    alike = "; ".join(f"{key.lower()} {value}" for key, value in asked[0][2].items() if key not in differing)
    rows = [[title, who, *(values[key] for key in differing)] for title, who, values in asked]
    caption = f"Results of a task are compared where all but the dtype is equal. Alike everywhere: {alike or 'nothing'}."
    return [Table(["Task", "Models", *differing], rows, caption, len(differing) + 2)]


def _conditions(model: Model, task: str) -> dict[str, str]:
    result = model.results[task]
    found = result["conditions"]["noted"] | result["conditions"]["compared"]
    values = {"Rows": f"{result['n']:,}"}
    for name, title in SETTINGS.items():
        value = found.get(name)
        words = {None: "the model's context" if name == "max_tokens" else DASH, True: "yes", False: "no"}
        text = words[value] if value is None or isinstance(value, bool) else str(value)
        values[title] = text[:6] if name in ("test_rows", "pool_rows", "prompt") else text  # digests
    return values


def _made_with(report: Report) -> list[Block]:
    rows: list[Sequence[Cell | str]] = []
    for model in report.everyone:
        facts = "; ".join(f"{k} {v:,}" if type(v) is int else f"{k} {v}" for k, v in model.facts.items())
        where = f"{model.description['path']}; weights {model.description['weights'][:16]}"
        rows.append([model.name, f"{where}{'; ' + facts if facts else ''}"])
    rows += [[key, str(value)] for key, value in report.metadata.items()]
    skipped = [Items(report.skipped, "Files that could not be read")] if report.skipped else []
    return [Table(["What", "Which"], rows, words=2), *skipped]
