"""The report of evaluated models as a document: which is better, by how much, and on which rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from emo.common.report.document import Block, Cell, Document, Fold, Items, Quote, ReportSection, Row, Table
from emo.common.report.figure import Curve, Curves, Dots, Figure, finite_points
from emo.common.report.numbers import (
    DASH,
    Effect,
    describe_changes,
    format_interval,
    formatted,
    p_value,
    percent,
)
from emo.common.text import counted

from ..results.directory import Model
from . import judged
from .compare import Comparison
from .families import OBJECTIVES
from .gather import Report

FILES = ("report.html", "report.md", "results.json")
UNREADABLE = "unreadable"  # instead of a number whose file is damaged
SAMPLES_SHOWN = 4
CONFUSION_LABELS = 8
TONES = {1: "better", -1: "worse", 0: ""}
VERDICTS = {1: ("better", "better"), -1: ("worse", "worse"), 0: ("no clear difference", "unclear")}
SCORES = {
    "openicl_ppl": ("whole-prompt perplexity", "nats per token of the whole prompt"),
    "suffix_sum": ("label likelihood", "nats of the label"),
    "suffix_mean": ("label likelihood per token", "nats per token of the label"),
    "channel": ("channel", "nats of the text, given the label"),
    "calibrated": ("calibrated", "nats of the label, less those without the text"),
}
# Condition of a result -> column of the settings table.
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
    "pool": "Demonstrations chosen from",
    "pool_rows": "Rows of demonstrations",
    "prompt": "Text of prompts",
}
DETAILS = (
    "Accuracy in per cent with each score; the deciding score is in bold. Clean: without leaked test rows, "
    "whose text is among the rows that demonstrations come from. Shortened: prompts that lost "
    "demonstrations (in brackets: text of the query) to the context. Trained on: test rows that share long "
    "passages with the training text. Without: the accuracy on the other rows."
)
WRONG = (
    "The most confident errors, with the demonstrations in the prompt (most similar first) and the score "
    "of every label. The smallest score wins. Rows are numbered from 0, as in the data."
)
DIFFERENCES = (
    "Percentage points with 95 % intervals (Bonett and Price), paired by test row. The p-values are from "
    "exact McNemar tests with Holm's correction over the tasks, and from random signs for the mean. The "
    "verdict is on the mean: p below 0.05 and an interval without zero."
)


def document(report: Report) -> Document:
    """Return the report."""
    shading = "Rows: the right label. Columns: the answer. Shading: share of the row."
    sampled = "The first texts of each model, sampled from the full distribution (temperature 1)."
    data = report.numbers()
    samples = [
        Quote(s["text"] + ("" if s["ended"] else " …"), s["prefix"], "" if i else model.name)
        for model in report.everyone
        for i, s in enumerate(model.samples[:SAMPLES_SHOWN])
    ]
    sections = [
        ReportSection("Accuracy", *_accuracy(report)),
        *(
            ReportSection(f"Difference from {first}", *_differences(report, first))
            for first in report.against
        ),
        ReportSection("Training", _training(report)),
        ReportSection("Accuracy over training", _over_training(report)),
        *judged.sections(report.judgements, report.judgement_pairs),
        ReportSection("Details", _details(report)),
        ReportSection("Sampled text", sampled, *samples, page_only=True),
        ReportSection("Confusion", shading, *_confusions(report), page_only=True),
        ReportSection("Most confident errors", WRONG, *_worst(report), page_only=True),
        ReportSection("Settings", _settings(report), page_only=True),
        ReportSection("Provenance", *_provenance(report, data["metadata"])),
    ]
    answers = [*_uneven(report), *_answer(report), *judged.answers(report.judgements)]
    data["answer"] = answer = answers or ["No task was scored and no answer was judged."]
    means = [Dots(f"Points from {b}, mean over tasks", report.effects(None, b), 0.0) for b in report.against]
    picture = Figure(
        "Mean differences",
        means,
        "With 95 % intervals, paired by test row. Right of the dotted line is an improvement.",
    )
    picture = picture or _levels(report, "Mean accuracy", [None]) or judged.plot_win_rates(report.judgements)
    about = f"{report.title}. {_contents(report)}"
    return Document(report.title, answer, about, sections, picture, report.remarks, report.notice, data)


def _contents(report: Report) -> str:
    """Return a sentence on the numbers of models, tasks and rows, or of judgements."""
    if not report.rows:
        return f"{counted(len(report.judgements), 'comparison')} of answers by judges."
    models = counted(len(report.models), "model")
    tasks = counted(len(report.tasks), "task")
    rows = max(sum(r["n"] for r in report.rows if r["model"] == m.name) for m in report.models)
    kinds = sorted({(r["shots"], str(r["retriever"])) for r in report.rows})
    shots = "; ".join(f"{shots} ({by})" for shots, by in kinds)
    return f"{models}, {tasks}, {rows:,} test rows per model; demonstrations in a prompt: {shots}."


def _answer(report: Report) -> list[str]:
    """Return the results of the comparisons by base, or the accuracies if there are none."""
    sentences: list[str] = []
    for family in report.families:
        clauses: list[str] = []
        for first in (m.name for m in family.members if m.name in report.against):
            if effects := report.effects(None, first):
                counts = {len(c.tasks) for c in report.against[first].values() if c.mean}
                on = counted(counts.pop(), "task") if len(counts) == 1 else "the tasks in common"
                start = f"{'compared' if clauses else 'Compared'} with {first} on {on}"
                clauses.append(f"{start}, {describe_changes(effects, 'points')}")
        sentences += [f"{'; '.join(clauses)}."] if clauses else []
    if not sentences:
        sentences = [_describe_accuracy(report, effect) for effect in report.effects(None)]
    for family in report.families:
        if family.title and family.base is None and not report.chosen:
            children = counted(len(family.members), "model")
            sentences.append(f"{family.title}, which {children} started from, was not evaluated.")
    return sentences


def _describe_accuracy(report: Report, effect: Effect) -> str:
    accuracy = formatted(effect.value, "{:.1f}")
    tasks = counted(len(report.tasks), "task")
    interval = f"95 % interval {format_interval(effect.low, effect.high)}"
    chance = percent(report.chance(None))
    return f"{effect.label}: accuracy {accuracy} % on {tasks} ({interval}); chance is {chance} %."


def _uneven(report: Report) -> list[str]:
    """Return a sentence for each comparison whose prompts differ between the models."""
    comparisons = [c for others in report.against.values() for c in others.values()]
    return [f"{text}." for text in dict.fromkeys(c.warning for c in comparisons if c.uneven)][:3]


def _levels(report: Report, label: str, tasks: Sequence[str | None]) -> Figure:
    """Return a figure of accuracies with a panel for each task. None stands for the mean."""
    titles = report.titles | {None: "Mean over tasks"}
    drawn = [(task, rows) for task in tasks if (rows := report.effects(task))]
    panels = [Dots(titles[task], rows, 100 * report.chance(task)) for task, rows in drawn]
    caption = "Accuracy in per cent with 95 % intervals. Dotted line: chance, if it is near."
    return Figure(label, panels, caption)


def _folded(report: Report, figure: Figure) -> Block:
    """Return a figure with a panel for each task, folded if there are many models."""
    return Fold("Figure by task", [figure]) if len(report.models) > 8 else figure


def _heading(report: Report, number: int) -> Cell:
    """Return a model's name with a description."""
    model = report.models[number]
    family = next(f for f in report.families if model in f.members)
    objective = str(model.facts.get("objective") or "")
    notes = ["base model"] if family.base is model else []
    if objective.lower() not in model.name.lower():
        notes.append(OBJECTIVES.get(objective, objective))
    if len(report.families) > 1 and family.title and family.base is not model:
        notes.append(f"from {family.title}")
    return Cell(model.name, ", ".join(notes), mark=number)


Column = tuple[str, dict[Any, Effect]]  # title, effects by model


def _columns(report: Report, baseline: str | None = None) -> dict[str | None, Column]:
    """Return the columns of a table by task, with the mean (None) first if there are several tasks."""
    mean: dict[str | None, str] = {None: "Mean"} if len(report.tasks) > 1 else {}
    columns = mean | report.titles
    return {t: (title, {e.series: e for e in report.effects(t, baseline)}) for t, title in columns.items()}


def _estimated(effect: Effect, form: str = "{:.1f}", note: str = "") -> Cell:
    limits = format_interval(effect.low, effect.high, form)
    return Cell(formatted(effect.value, form), limits + note, TONES[effect.direction])


def _accuracy(report: Report) -> list[Block]:
    columns = _columns(report)
    rows = list[Row]()
    for i, model in enumerate(report.models if report.tasks else []):
        cells: list[Cell | str | None] = [_heading(report, i)]
        for task, (_, effects) in columns.items():
            unreadable = Cell(UNREADABLE, tone="worse") if task in model.unreadable else None
            cells.append(_estimated(effects[i]) if i in effects else unreadable)
        rows.append(cells)
    rows += _reference_rows(report, list(columns))
    caption = "Per cent with 95 % intervals (Wilson). The interval of the mean assumes independent tasks."
    if report.against:
        caption += " ↑ ↓: better or worse than the model's first baseline below, by test and interval."
    if any(task in m.unreadable for m in report.models for task in report.tasks):
        caption += f" {UNREADABLE.capitalize()}: the result's file is damaged. See the last section."
    figure = _levels(report, "Accuracy", report.tasks)
    head = ["Model", *(title for title, _ in columns.values())]
    return [Table(head, rows, caption), _folded(report, figure)]


def _reference_rows(report: Report, tasks: Sequence[str | None]) -> Iterator[Row]:
    """Yield the rows of aggregated seeds, of chance and of the majority label."""
    for label, names in report.seeds.items():
        spreads = [report.over_seeds(label, t) or (None, None) for t in tasks]
        texts = [percent(mean) + (f" ± {percent(sd)}" if sd is not None else "") for mean, sd in spreads]
        yield [f"{label} ({counted(len(names), 'seed')}, mean ± standard deviation)", *texts]
    for label, key in (("Chance", "chance"), ("Majority label", "majority")) if report.tasks else ():
        shares = [percent(report.chance(task, key)) for task in tasks]
        yield [Cell(text, tone="quiet") for text in (label, *shares)]


def _differences(report: Report, baseline: str) -> list[Block]:
    """Return the differences from a baseline with their tests."""
    comparisons = report.against[baseline]
    columns = _columns(report, baseline)
    rows = [
        _difference_row(report, i, comparisons[model.name], columns)
        for i, model in enumerate(report.models)
        if model.name in comparisons
    ]
    titles = report.titles
    panels = [Dots(title, report.effects(task, baseline), 0.0) for task, title in titles.items()]
    caption = "Points. Right of the dotted line is an improvement."
    figure = Figure(f"Differences from {baseline}", panels, caption)
    reasons = [(c.model, titles[task], why) for c in comparisons.values() for task, why in c.refused.items()]
    head = ["Model", "Verdict", *(title for title, _ in columns.values())]
    items = Items([f"{model}, {title}: {why}" for model, title, why in reasons], "Not comparable")
    return [Table(head, rows, DIFFERENCES, 2), _folded(report, figure), items]


def _difference_row(report: Report, number: int, c: Comparison, columns: dict[str | None, Column]) -> Row:
    verdict, tone = VERDICTS[c.mean["direction"]] if c.mean else ("not comparable", "quiet")
    partial = len(c.tasks) < len(report.tasks)
    notes = [f"of {len(c.tasks)} tasks"] if partial else []
    for direction in (1, -1):
        if count := sum(x["direction"] == direction for x in c.tasks.values()):
            notes.append(f"{counted(count, 'task')} {TONES[direction]}")
    cells: list[Any] = [_heading(report, number), Cell(verdict, ", ".join(notes), tone)]
    for task, (_, effects) in columns.items():
        if number in effects and not (task is None and partial):
            p = c.tasks[task]["p_holm"] if task else (c.mean or {})["p"]
            cells.append(_estimated(effects[number], "{:+.1f}", f", {p_value(p)}"))
        else:
            refused = c.refused if task is None else task in c.refused
            cells.append(Cell("not comparable" if refused else DASH, tone="quiet"))
    return cells


def _details(report: Report) -> Table:
    rows: list[Row] = []
    names = [name for name in SCORES if any(r.get(name) is not None for r in report.rows)]
    for r in sorted(report.rows, key=lambda r: report.tasks.index(r["task"])):
        scores = [Cell(percent(r.get(s)), tone="best" if s == r["score"] else "") for s in names]
        cut = f"{r['rows_shortened']:,}" + (f" ({r['rows_cut']:,})" if r["rows_cut"] else "")
        shares = [percent(r[key]) for key in ("macro_f1", "clean_accuracy")]
        others = [r["leaked"], cut, r["trained_on"], percent(r["untrained_accuracy"])]
        rows.append([r["title"], r["model"], r["n"], *scores, *shares, *others])
    head = ["Task", "Model", "Rows", *(SCORES[s][0] for s in names), "Macro F1", "Clean", "Leaked"]
    return Table([*head, "Shortened", "Trained on", "Without"], rows, DETAILS, 2)


def _training(report: Report) -> Figure:
    logs = [(i, m) for i, m in enumerate(report.everyone) if m.metrics]
    panels = []
    for key, title in (("nll", "Loss in nats per token (NLL)"), ("demd", "Expected transport cost (DEMD)")):
        drawn = [
            (i, [finite_points(m.metrics, "tokens", k) for k in (key, f"validation_{key}")]) for i, m in logs
        ]
        curves = [Curve(i, line, marks) for i, (line, marks) in drawn if line or marks]
        panels.append(Curves(title, curves, "tokens"))
    legend = [(i, m.name) for i, m in logs]
    return Figure("Training", panels, "Lines: training batches. Circles: held-out data.", legend)


def _over_training(report: Report) -> Figure:
    """Return the accuracy of runs with several evaluated checkpoints, over tokens or else over steps."""
    runs: dict[str, list[tuple[Model, Effect]]] = {}
    for effect in report.effects(None):
        model = report.models[effect.series or 0]
        if model.facts.get("run"):
            runs.setdefault(str(model.facts["run"]), []).append((model, effect))
    curves: dict[str, Curve] = {}
    for key in ("tokens", "step"):
        for run, stages in runs.items():
            if len(stages) > 1 and all(isinstance(model.facts.get(key), int) for model, _ in stages):
                points = sorted((model.facts[key], *effect[3:]) for model, effect in stages)
                band = [(x, low, high) for x, _, low, high in points]
                curves[run] = Curve(len(curves), [(x, y) for x, y, *_ in points], [], band)
        if curves:
            break
    panel = Curves("Mean accuracy", [*curves.values()], "steps" if key == "step" else key)
    names = [(i, Path(run).name) for i, run in enumerate(curves)]
    return Figure("Accuracy over training", [panel], "Per cent. The band is the 95 % interval.", names)


def _cells(report: Report) -> Iterator[tuple[int, Model, dict[str, Any]]]:
    """Yield the number of the model, the model and the result, task by task."""
    for task, (number, model) in product(report.tasks, enumerate(report.models)):
        if task in model.results:
            yield number, model, model.results[task]


def _confusions(report: Report) -> list[Block]:
    folds: dict[str, list[Block]] = {}
    for _, model, result in _cells(report):
        shares = [[Cell(f"{n:,}", shade=n / max(sum(row), 1)) for n in row] for row in result["confusion"]]
        rows = [[label, *row] for label, row in zip(result["labels"], shares, strict=True)]
        if len(rows) <= CONFUSION_LABELS:
            table = Table(["Right label", *result["labels"]], rows, label=model.name)
            folds.setdefault(result["title"], []).append(table)
    return [Fold(title, tables) for title, tables in folds.items()]


def _worst(report: Report) -> list[Block]:
    """Return the most confident errors."""
    folds: list[Block] = []
    for number, model, result in _cells(report):
        blocks: list[Block] = []
        for sample in result["worst"]:
            roles = {sample["gold"]: Cell("right answer", tone="better")}
            roles |= {sample["prediction"]: Cell("the model's answer", tone="worse")}
            scores = sorted(sample["scores"].items(), key=lambda item: item[1])
            rows = [[label, f"{value:.4f}", roles.get(label, "")] for label, value in scores]
            title = f"Data row {sample['id']}: {sample['gold']}, answered {sample['prediction']}"
            demonstrations = [f"{d['text']} → {d['label']}" for d in sample["demonstrations"]]
            table = Table(["Label", SCORES[result["score"]][1], "Role"], rows)
            blocks += [Quote(sample["text"], title=title), table, Items(demonstrations, "Demonstrations")]
        folds += [Fold(f"{result['title']}, {model.name}", blocks, number)] if blocks else []
    return folds


def _settings(report: Report) -> Table:
    """Return the settings of each task. Models with the same settings share a row."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for _, model, result in _cells(report):
        conditions = result["conditions"]["noted"] | result["conditions"]["compared"]
        values = [result["title"], f"{result['n']:,}"]
        for name in SETTINGS:
            value = conditions.get(name)
            words = {None: "the model's context" if name == "max_tokens" else DASH, True: "yes", False: "no"}
            text = words[value] if value is None or isinstance(value, bool) else str(value)
            values.append(text[:6] if name in ("test_rows", "pool_rows", "prompt") else text)  # digests
        kinds.setdefault(tuple(values), []).append(model.name)
    names = ["Rows", *SETTINGS.values()]
    columns = list(zip(*(values for _, *values in kinds), strict=True))
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    shared = [f"{names[i].lower()} {c[0]}" for i, c in enumerate(columns) if i not in differing]
    rows = [[key[0], ", ".join(m), *(key[i + 1] for i in differing)] for key, m in kinds.items()]
    caption = f"Shared settings: {'; '.join(shared) or 'none'}."
    return Table(["Task", "Models", *(names[i] for i in differing)], rows, caption, len(names) + 2)


def _provenance(report: Report, metadata: dict[str, str]) -> list[Block]:
    rows: list[Row] = []
    for model in report.everyone:
        facts = [f"{k} {v:,}" if type(v) is int else f"{k} {v}" for k, v in model.facts.items()]
        origin = [str(model.description["path"]), f"weights {model.description['weights'][:16]}"]
        rows.append([model.name, "; ".join([*origin, *facts])])
    rows += [[key, str(value)] for key, value in metadata.items()]
    return [
        Table(["Source", "Details"], rows, words=2),
        Items(report.skipped, "Files that could not be read"),
    ]
