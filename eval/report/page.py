"""The report of evaluated models as a document: which is better, by how much, and on which rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from emo.common.report.document import Block, Cell, Document, Fold, Items, Quote, ReportSection, Table, drawn
from emo.common.report.figure import Curve, Curves, Figure, finite_points, mean_points
from emo.common.report.numbers import COMPARED, DASH, Effect, describe_effects, formatted, p_value, percent
from emo.common.text import counted
from emo.data_prep.shards.cost_table import cost_tables

from ..results.directory import Model, TaskResult, find_model
from . import judged
from .families import OBJECTIVES
from .gather import Report

FILES = ("report.html", "report.md", "results.json")
UNREADABLE = "unreadable"  # instead of a number whose file is damaged
SAMPLES_SHOWN = 4
CONFUSION_LABELS = 8
UNFOLDED = 60  # differences by task that are shown without a click
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
    "shots": "Demonstrations per prompt",
    "retriever": "Demonstrations chosen by",
    "score": "Score",
    "inferencer": "Scoring code",
    "faithful": "Exactly as OpenICL",
    "max_tokens": "Longest prompt, tokens",
    "dtype": "Number format",
    "scorer": "Version of the scoring code",
    "test_rows": "Hash of the test rows",
    "pool": "Source of demonstrations",
    "pool_rows": "Hash of the demonstrations",
    "prompt": "Hash of the prompts",
}
DETAILS = (
    "Accuracy in per cent with each score. The score that counts is in bold. The text of leaked rows is also "
    "among the possible demonstrations. Shortened prompts lost demonstrations (in brackets: question text)."
)
TRAINED_ON = " Rows in training text share long passages with it."
WRONG = (
    "For each task and model: the wrong answers that the model was most certain of. The answer with the "
    "smallest score wins. Demonstrations are listed from most to least similar. Rows are numbered from 0."
)
HARNESS = (
    "Numbers of lm-evaluation-harness. Comparisons use the metric in bold. Accuracies are compared above. "
    "Other metrics have Student's test for paired rows. Perplexities are compared by their logarithms."
)
SUMMARY = (
    "Mean over tasks, in percentage points with 95 % intervals, paired by test row. Right of zero is an "
    "improvement. A difference is clear if its test rejects (p < 0.05) and its interval excludes zero."
)
TESTS = (
    "All tests pair the models by row. Tasks: Bonett and Price intervals and exact McNemar tests with Holm's "
    "correction over the tasks of a comparison. Mean: a test with random signs."
)
ONE_RUN = "One training run per model: the intervals cover the choice of test rows, not the training seed."


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
        ReportSection("Differences by task", *_differences(report)),
        ReportSection("Accuracy", *_accuracy(report)),
        ReportSection("Training", _training(report)),
        ReportSection("Preparation of the data", *cost_tables(report.recipes)),
        ReportSection("Accuracy over training", _over_training(report)),
        ReportSection("Metrics of lm-eval", _harness(report)),
        ReportSection("By length", *_lengths(report)),
        *judged.sections(report.judgements, report.judgement_pairs),
        ReportSection("Details", _details(report)),
        ReportSection("Sampled text", sampled, *samples, page_only=True),
        ReportSection("Confusion", shading, *_confusions(report), page_only=True),
        ReportSection("Most confident errors", WRONG, *_worst(report), page_only=True),
        ReportSection("Settings", *_settings(report), page_only=True),
        ReportSection("Provenance", *_provenance(report, data["metadata"])),
    ]
    answer = [*_answer(report), *judged.answers(report.judgements)]
    answer = answer or ["No task was scored and no answer was judged."]
    caveat = report.notice or (ONE_RUN if report.against and not report.seeds else "")
    remarks = [*filter(None, [caveat]), *report.remarks]
    about = f"{report.title}. {_contents(report)}"
    page = Document(report.title, answer, about, sections, _picture(report), remarks, data)
    data["answer"] = page.answer
    return page


def _contents(report: Report) -> str:
    """Return a sentence on the numbers of models, tasks and rows, or of judgements."""
    if not report.rows and report.measured:
        return f"{counted(len(report.models), 'model')}, {counted(len(report.measured), 'task')}."
    if not report.rows:
        return f"{counted(len(report.judgements), 'comparison')} of answers by judges."
    models = counted(len(report.models), "model")
    tasks = counted(len(report.tasks), "task")
    rows = max(sum(r["n"] for r in report.rows if r["model"] == m.name) for m in report.models)
    kinds = sorted({(r["shots"], str(r["retriever"])) for r in report.rows})
    shots = " or ".join(f"{shots} (chosen by {by})" for shots, by in kinds)
    return f"{models}, {tasks}, {rows:,} test rows per model. Demonstrations per prompt: {shots}."


def _answer(report: Report) -> list[str]:
    """Return the results of the comparisons by base, or the accuracies if there are none."""
    sentences: list[str] = []
    on = ""
    for first in (m.name for family in report.families for m in family.members if m.name in report.against):
        if effects := report.effects(None, first):
            counts = {len(c.tasks) for c in report.against[first].values() if c.mean}
            before, on = on, counted(counts.pop(), "task") if len(counts) == 1 else "the tasks in common"
            where = "" if on == before else f" on {on}"
            sentences.append(
                f"Compared with {first}{where}, {describe_effects(effects, COMPARED, 'points')}."
            )
    on = f"on {counted(len(report.tasks), 'task')}"
    measured = report.harness_results() or report.harness_results(lengths=True)
    for _, model, x in measured if not report.tasks else ():
        sentences.append(f"{model.name}: {x['score']} {x['measure']['value']:.4g} on {x['title']}.")
    for e in report.effects(None) if not sentences else ():
        chance = percent(report.chance(None))
        sentences.append(f"{e.label}: accuracy {formatted(e.value, '{:.1f}')} % {on}; chance is {chance} %.")
    for family in report.families:
        if family.title and family.base is None and not report.chosen:
            children = counted(len(family.members), "model")
            sentences.append(f"{family.title}, which {children} started from, was not evaluated.")
    return sentences


def _picture(report: Report) -> Table:
    """Return the mean differences, or else the mean accuracies, or else the win rates."""
    pairs = [(b, c) for b, comparisons in report.against.items() for c in comparisons.values()]
    rows: list[list[Any]] = []
    for baseline, c in pairs if report.tasks else []:
        verdict, tone = VERDICTS[c.mean.direction] if c.mean else ("not comparable", "quiet")
        counts = [sum(x.direction == direction for x in c.tasks.values()) for direction in (1, -1)]
        of = f"{len(c.tasks)} of " if len(c.tasks) < len(report.tasks) else ""
        note = f"{counts[0]} better, {counts[1]} worse of {of}{counted(len(report.tasks), 'task')}"
        name = Cell(c.model, f"against {baseline}", mark=report.series[c.model])
        effects = [e for e in report.effects(None, baseline) if e.label == c.model]
        cells = _tested(effects[0], c.mean.p) if effects and c.mean else [Cell(""), Cell(DASH)]
        rows.append([name, Cell(verdict, note, tone), *cells])
    if rows:
        return Table(["Model", "Verdict", "← worse · better →", "Points, 95 % interval"], rows, SUMMARY, 2)
    rows = [[_heading(report, e.label), *drawn(e, "{:.1f}")] for e in report.effects(None)]
    if rows:
        chance = 100 * report.chance(None)
        caption = "Mean over tasks in per cent, with 95 % intervals. The dark line is chance."
        return Table(["Model", "Accuracy", "Per cent"], rows, caption, line=chance)
    return judged.draw_win_rates(report.judgements)


def _heading(report: Report, name: str) -> Cell:
    """Return a model's name with a description."""
    model = find_model(report.models, name)
    family = next(f for f in report.families if model in f.members)
    objective = str(model.facts.get("objective") or "")
    notes = ["base model"] if family.base is model else []
    if objective.lower() not in model.name.lower():
        notes.append(OBJECTIVES.get(objective, objective))
    if len(report.families) > 1 and family.title and family.base is not model:
        notes.append(f"from {family.title}")
    return Cell(model.name, ", ".join(notes), mark=report.series[name])


def _accuracy(report: Report) -> list[Block]:
    """Return the accuracies. The longer of both lists, models or tasks, goes down the page."""
    mean: dict[str | None, str] = {None: "Mean"} if len(report.tasks) > 1 else {}
    titles = mean | report.titles
    effects = {task: {e.label: e for e in report.effects(task)} for task in titles}
    grid: list[list[Cell]] = []
    for model in report.models if report.tasks else []:
        cells = [_heading(report, model.name)]
        for task in titles:
            effect = effects[task].get(model.name)
            missing = Cell(UNREADABLE, tone="worse") if task in model.unreadable else Cell(DASH)
            cells.append(drawn(effect, "{:.1f}")[1] if effect else missing)
        grid.append(cells)
    grid += _reference_rows(report, list(titles))
    caption = "Per cent with 95 % intervals."
    if report.against:
        caption += " ↑ ↓: clearly better or worse than the model's first baseline."
    if any(task in m.unreadable for m in report.models for task in report.tasks):
        caption += f" {UNREADABLE.capitalize()}: the result's file is damaged. See the last section."
    grid = [[Cell("Model"), *map(Cell, titles.values())], *grid]
    if len(report.models) <= len(report.tasks):
        grid = [list(column) for column in zip(*grid, strict=True)]
        grid[0][0] = Cell("Task")
    return [Table(grid[0], grid[1:] if report.tasks else [], caption)]


def _reference_rows(report: Report, tasks: Sequence[str | None]) -> Iterator[list[Cell]]:
    """Yield the rows of aggregated seeds, of chance and of the most common label."""
    for label, names in report.seeds.items():
        spreads = [report.over_seeds(label, t) or (None, None) for t in tasks]
        texts = [percent(mean) + (f" ± {percent(sd)}" if sd is not None else "") for mean, sd in spreads]
        yield [Cell(label, f"{counted(len(names), 'seed')}, mean ± standard deviation"), *map(Cell, texts)]
    for label, key in (("Chance", "chance"), ("Most common label", "majority")) if report.tasks else ():
        shares = [percent(report.chance(task, key)) for task in tasks]
        yield [Cell(text, tone="quiet") for text in (label, *shares)]


def _differences(report: Report) -> list[Block]:
    """Return the differences from all baselines by task on one axis."""
    rows: list[list[Any]] = []
    for task, title in report.titles.items():
        pairs = [(b, e) for b in report.against for e in report.effects(task, b)]
        for i, (baseline, e) in enumerate(pairs):
            name = Cell(e.label, f"against {baseline}", mark=e.series)
            p = report.against[baseline][e.label].tasks[task].p_holm
            rows.append([Cell(title, tone="again" * (i > 0)), name, *_tested(e, p)])
    comparisons = [c for others in report.against.values() for c in others.values()]
    reasons = [
        f"{report.titles.get(task, task)}, {c.model} against {c.baseline}: {why}"
        for c in comparisons
        for task, why in c.refused.items()
    ]
    table = Table(["Task", "Model", "← worse · better →", "Points, 95 % interval"], rows, words=2)
    shown = table if len(rows) <= UNFOLDED else Fold(f"{len(rows)} differences", [table])
    tests = Fold("How the differences are tested", [TESTS] if rows else [])
    return [shown, Items(reasons, "Not comparable"), tests]


def _tested(effect: Effect, p: float) -> list[Cell]:
    """Return the cells of a difference with the p-value of its test."""
    dot, points = drawn(effect, "{:+.1f}")
    return [dot, replace(points, note=f"{points.note}, {p_value(p)}")]


def _details(report: Report) -> Table:
    rows: list[list[Any]] = []
    names = [name for name in SCORES if any(r.get(name) is not None for r in report.rows)]
    known = any(r["trained_on"] is not None for r in report.rows)
    previous = None
    for r in sorted(report.rows, key=lambda r: report.tasks.index(r["task"])):
        scores = [Cell(percent(r.get(s)), tone="best" if s == r["score"] else "") for s in names]
        cut = f"{r['rows_shortened']:,}" + (f" ({r['rows_cut']:,})" if r["rows_cut"] else "")
        others = [percent(r["macro_f1"]), r["leaked"], percent(r["clean_accuracy"]), cut]
        others += [r["trained_on"], percent(r["untrained_accuracy"])] if known else []
        title = Cell(r["title"], tone="again" * (r["task"] == previous))
        rows.append([title, Cell(r["model"], mark=report.series[r["model"]]), r["n"], *scores, *others])
        previous = r["task"]
    head = ["Task", "Model", "Rows", *(SCORES[s][0].capitalize() for s in names), "Macro F1", "Leaked rows"]
    head += ["Without leaked rows", "Shortened prompts"]
    head += ["Rows in training text", "Without these"] if known else []
    return Table(head, rows, DETAILS + TRAINED_ON * known, 2)


def _harness(report: Report) -> Table:
    """Return all metrics of lm-eval's tasks, with tests of the metrics other than accuracy."""
    rows: list[list[Any]] = []
    for task, model, result in report.harness_results():
        found = report.against_first(model)
        for metric, value in result["metrics"].items():
            cells = [Cell(DASH), Cell(DASH)]
            if metric == result["score"] and (measure := result.get("measure")):
                if measure["interval"]:
                    cells[0] = Cell("{low:.4g} to {high:.4g}".format(**measure["interval"]))
                if found and (x := found.measures.get(task)):
                    verdict, tone = VERDICTS[x.direction]
                    cells[1] = Cell(verdict, f"{x.difference:+.4g}, {p_value(x.p_holm)}", tone)
            decides = "best" if metric == result["score"] else ""
            title = Cell(result["title"], tone="again" * bool(rows and rows[-1][0].text == result["title"]))
            name = Cell(model.name, mark=report.series[model.name])
            cut = DASH if result["answers_cut"] is None else f"{result['answers_cut']:,}"
            rows.append([title, name, metric, Cell(f"{value:.4g}", tone=decides), *cells, result["n"], cut])
    head = ["Task", "Model", "Metric, filter", "Value", "95 % interval", "Against the baseline", "Rows"]
    return Table([*head, "Answers at the length limit"], rows, HARNESS, 3)


def _lengths(report: Report) -> list[Block]:
    """Return a table of each measure over lengths, with a column for each model."""
    found = report.harness_results(lengths=True)
    tables: list[Block] = []
    for task in dict.fromkeys(task for task, *_ in found):
        models = [(model, result) for name, model, result in found if name == task]
        result = models[0][1]
        labels = dict.fromkeys(part["label"] for _, x in models for part in x["lengths"])
        rows: list[Any] = [[label, *(_at_length(report, *m, label) for m in models)] for label in labels]
        names = [Cell(model.name, mark=report.series[model.name]) for model, _ in models]
        caption = f"{result['score'].capitalize()} with 95 % intervals, n {result['n']:,}."
        tables.append(Table(["Tokens", *names], rows, caption, label=result["title"]))
    return tables


def _at_length(report: Report, model: Model, result: TaskResult, label: str) -> Cell:
    """Return the value at a length, or of all rows with the test against the model's baseline."""
    part = next((part for part in result["lengths"] if part["label"] == label), None)
    if part is None:
        return Cell(DASH)
    notes = ["{low:.4g} to {high:.4g}".format(**part["interval"])] if part["interval"] else []
    tone = ""
    comparison = report.against_first(model) if part is result["lengths"][-1] else None
    if comparison and (x := comparison.measures.get(result["task"])):
        verdict, tone = VERDICTS[x.direction]
        notes.append(f"{verdict}, {x.difference:+.4g}, {p_value(x.p_holm)}")
    return Cell(f"{part['value']:.4g}", "; ".join(filter(None, [*notes, part["note"]])), tone)


def _training(report: Report) -> Figure:
    logs = [m for m in report.everyone if m.metrics]
    panels = []
    for key, title in (("nll", "Loss, nats per token"), ("demd", "Embedding distance to the target (DEMD)")):
        curves = [
            Curve(report.series[m.name], mean_points(m.metrics, "tokens", key),
                  finite_points(m.metrics, "tokens", f"validation_{key}"))
            for m in logs
        ]  # fmt: skip
        panels.append(Curves(title, [c for c in curves if c.points or c.marks], "tokens"))
    legend = [(report.series[m.name], m.name) for m in logs]
    return Figure("Training", panels, "Lines: training batches. Circles: held-out data.", legend)


def _over_training(report: Report) -> Figure:
    """Return the accuracy of runs with several evaluated checkpoints, over tokens or else over steps."""
    runs: dict[str, list[tuple[Model, Effect]]] = {}
    for effect in report.effects(None):
        model = find_model(report.models, effect.label)
        if model.facts.get("run"):
            runs.setdefault(str(model.facts["run"]), []).append((model, effect))
    curves: dict[str, Curve] = {}
    for key in ("tokens", "step"):
        for run, stages in runs.items():
            if len(stages) > 1 and all(isinstance(model.facts.get(key), int) for model, _ in stages):
                points = sorted((model.facts[key], *effect[3:]) for model, effect in stages)
                band = [(x, low, high) for x, _, low, high in points]
                curves[run] = Curve(stages[0][1].series, [(x, y) for x, y, *_ in points], [], band)
        if curves:
            break
    panel = Curves("Mean accuracy, per cent", [*curves.values()], "steps" if key == "step" else key)
    names = [(curve.series, Path(run).name) for run, curve in curves.items()]
    return Figure("Accuracy over training", [panel], "The bands are 95 % intervals.", names)


def _cells(report: Report) -> Iterator[tuple[int, Model, TaskResult]]:
    """Yield the series of the model, the model and the result, task by task."""
    for task, model in product(report.tasks, report.models):
        if task in model.results:
            yield report.series[model.name], model, model.results[task]


def _confusions(report: Report) -> list[Block]:
    folds: dict[str, list[Block]] = {}
    for _, model, result in _cells(report):
        shares = [[Cell(f"{n:,}", shade=n / max(sum(row), 1)) for n in row] for row in result["confusion"]]
        rows: list[list[Any]] = [[x, *row] for x, row in zip(result["labels"], shares, strict=True)]
        if len(rows) <= CONFUSION_LABELS:
            table = Table(["Right label", *result["labels"]], rows, label=model.name)
            folds.setdefault(result["title"], []).append(table)
    return [Fold(title, tables) for title, tables in folds.items()]


def _worst(report: Report) -> list[Block]:
    """Return the most confident errors, collapsed by task and model."""
    folds: dict[str, list[Block]] = {}
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
        if blocks:
            folds.setdefault(result["title"], []).append(Fold(model.name, blocks, number))
    return [Fold(title, models) for title, models in folds.items()]


def _settings(report: Report) -> list[Block]:
    """Return the settings that differ, in rows of models and tasks with the same ones, and the others."""
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
    shared = [[names[i], c[0]] for i, c in enumerate(columns) if i not in differing]
    rows = [[key[0], ", ".join(m), *(key[i + 1] for i in differing)] for key, m in kinds.items()]
    head = ["Task", "Models", *(names[i] for i in differing)]
    return [
        Table(head, rows if differing else [], words=len(head), label="Settings that differ"),
        Table(["Setting", "Value"], shared, words=2, label="Shared settings"),
    ]


def _provenance(report: Report, metadata: dict[str, str]) -> list[Block]:
    rows: list[list[Any]] = []
    for model in report.everyone:
        facts = [f"{k} {v:,}" if type(v) is int else f"{k} {v}" for k, v in model.facts.items()]
        origin = [str(model.description["path"]), f"weights {model.description['weights'][:16]}"]
        rows.append([model.name, "; ".join([*origin, *facts])])
    rows += [[key, str(value)] for key, value in metadata.items()]
    return [
        Table(["Source", "Details"], rows, words=2),
        Items(report.skipped, "Files that could not be read"),
    ]
