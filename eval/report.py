"""Everything known about evaluated models, gathered from files and written as JSON, Markdown and HTML."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.config import UserError
from eval import stats, store
from eval.job import require_views
from eval.score import SCORES
from eval.tasks import ORDER

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")
ALPHA = 0.05


@dataclass
class Model:
    """One evaluated model: its description, its result per task, its text and its training log."""

    name: str
    description: dict[str, Any]
    results: dict[str, dict[str, Any]]
    keys: dict[str, str]
    out: Path
    samples: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """step, tokens, objective, run: as far as the trainer left them."""
        return self.description["facts"]

    def records(self, task: str) -> list[dict[str, Any]]:
        """Per-row records of a task, in row order."""
        chunks = sorted((self.out / "store" / self.keys[task] / "chunks").glob("*.json"))
        return [record for chunk in chunks for record in json.loads(chunk.read_text())]


@dataclass
class Report:
    """What all three output formats are made of."""

    title: str
    notice: str
    models: list[Model]
    tasks: list[str]
    rows: list[dict[str, Any]]  # one per model x task
    comparisons: list[dict[str, Any]]  # one per model x task against the baseline
    baseline: str | None
    metadata: dict[str, Any]

    def row(self, model: str, task: str) -> dict[str, Any] | None:
        return next((r for r in self.rows if (r["model"], r["task"]) == (model, task)), None)

    def significant(self, model: str, task: str) -> int:
        """+1 / -1: better / worse than the baseline after Holm's correction; 0: cannot be told."""
        for c in self.comparisons:
            if (c["model"], c["task"]) == (model, task) and c["p_holm"] < ALPHA:
                return 1 if c["difference"] > 0 else -1
        return 0


def gather(
    outs: list[Path], runs: dict[str, Path], baseline: str | None = None, title: str = "", notice: str = ""
) -> Report:
    """Read the results under `outs`. runs: model name -> run directory, whose training log is shown.

    Models come in the order of `runs`, then by training step and name. UserError when there is nothing.
    """
    models = [_model(out, *view) for out in outs for view in require_views(out)]
    names = [m.name for m in models]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UserError(
            f"model {twice!r} stands in two of the directories; evaluate one under another --name"
        )
    for name in [*runs, *([baseline] if baseline else [])]:
        if name not in names:
            raise UserError(f"no results of a model {name!r}; there are: {', '.join(names)}")
    order = {name: i for i, name in enumerate(runs)}
    models.sort(key=lambda m: (order.get(m.name, len(order)), m.facts.get("step") or 0, m.name))
    for model in models:
        if model.name in runs:
            model.metrics = _metrics(runs[model.name])
    models = [m for m in models if m.results or m.samples]
    if not models:
        raise UserError(f"no finished results in {', '.join(map(str, outs))}")
    present = {task for m in models for task in m.results}
    tasks = [t for t in ORDER if t in present] + sorted(present - set(ORDER))
    first = baseline or models[0].name
    comparisons = compare_models(models, first, tasks)
    return Report(
        title=title or "In-context evaluation",
        notice=notice,
        models=models,
        tasks=tasks,
        rows=[_row(m, t) for m in models for t in tasks if t in m.results],
        comparisons=comparisons,
        baseline=first if comparisons else None,
        metadata=metadata(),
    )


def _model(out: Path, description: dict[str, Any], found: dict[str, dict[str, Any]]) -> Model:
    samples_file = out / "models" / description["name"] / "samples.json"
    samples = json.loads(samples_file.read_text()) if samples_file.is_file() else {"samples": []}
    current = samples.get("weights") == description["weights"]
    return Model(
        name=description["name"],
        description=description,
        results={task: view["result"] for task, view in found.items()},
        keys={task: view["key"] for task, view in found.items()},
        out=out,
        samples=samples["samples"] if current else [],
    )


def _metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"--run: {path} does not exist")
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a line that is being written
    return records


def _row(model: Model, task: str) -> dict[str, Any]:
    result = model.results[task]
    return {
        "model": model.name,
        "task": task,
        "title": result["title"],
        "accuracy": result["accuracy"],
        "low": result["bootstrap"]["low"],
        "high": result["bootstrap"]["high"],
        "chance": result["chance"],
        "majority": result["majority"],
        "n": result["n"],
        "macro_f1": result["macro_f1"],
        **{name: result["scores"][name]["accuracy"] for name in SCORES},
        "score": result["score"],
        "leaked": result["leaked"],
        "clean_accuracy": result["clean"]["accuracy"],
        "rows_shortened": result["rows_shortened"],
        "rows_cut": result["rows_cut"],
        "prompt": result["version"],
        "retriever": result["retriever"],
        "shots": result["shots"],
        "key": model.keys[task],
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }


def compare_models(models: list[Model], baseline: str, tasks: list[str]) -> list[dict[str, Any]]:
    """Every model against `baseline` on the same rows of each task; Holm over a model's tasks."""
    first = next(m for m in models if m.name == baseline)
    comparisons = []
    for other in models:
        if other is first:
            continue
        family = []
        for task in tasks:
            if task in first.results and task in other.results:
                found = compare_task(first, other, task)
                if found is not None:
                    family.append({"model": other.name, "baseline": baseline, "task": task, **found})
        for item, p in zip(family, stats.holm([f["p_mcnemar"] for f in family]), strict=True):
            item["p_holm"] = p
        comparisons += family
    return comparisons


def compare_task(a: Model, b: Model, task: str) -> dict[str, Any] | None:
    """Paired statistics of two models, or None when they were not asked the same rows."""
    first, second = a.records(task), b.records(task)
    asked = [[(r["row"], r["gold"], r["group"]) for r in records] for records in (first, second)]
    if asked[0] != asked[1]:
        return None
    right_a, right_b = ([r["prediction"] == r["gold"] for r in records] for records in (first, second))
    groups = [r["group"] for r in first] if a.results[task]["groups"] else None
    return stats.as_dict(stats.paired(right_a, right_b, groups))


def metadata() -> dict[str, Any]:
    """Where and with what a report was made."""
    return {
        "git": _git(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: _version(name) for name in VERSIONS},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git() -> str:
    """Commit of the code, with a mark when it was changed since; `unknown` outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return commit.stdout.strip() or "unknown"


def write(report: Report, target: Path) -> None:
    """report.html, report.md and results.json in `target`."""
    from eval.page import html

    store.replace(target / "results.json", store.dump(as_json(report)))
    store.replace(target / "report.md", markdown(report))
    store.replace(target / "report.html", html(report))


def as_json(report: Report) -> dict[str, Any]:
    """The numbers of the report."""
    return {
        "title": report.title,
        "notice": report.notice,
        "rows": report.rows,
        "comparisons": report.comparisons,
        "baseline": report.baseline,
        "models": [m.description | {"mean_accuracy": mean_accuracy(report, m)} for m in report.models],
        "metadata": report.metadata,
    }


def mean_accuracy(report: Report, model: Model) -> float | None:
    """Mean over tasks, for models that have them all."""
    values = [model.results[t]["accuracy"] for t in report.tasks if t in model.results]
    return sum(values) / len(values) if values and len(values) == len(report.tasks) else None


def markdown(report: Report) -> str:
    """The main tables as Markdown."""
    titles = [next(r["title"] for r in report.rows if r["task"] == t) for t in report.tasks]
    lines = [f"# {report.title}", ""]
    if report.notice:
        lines += [f"> {report.notice}", ""]
    lines += [
        "Accuracy in per cent",
        "",
        _md_row(["model", *titles, "mean"]),
        _md_row(["---"] * (len(titles) + 2)),
    ]
    for model in report.models:
        cells = [percent(report.row(model.name, t)) + _mark(report, model.name, t) for t in report.tasks]
        mean = mean_accuracy(report, model)
        lines.append(_md_row([model.name, *cells, "" if mean is None else f"{100 * mean:.1f}"]))
    chance = [next(r["chance"] for r in report.rows if r["task"] == t) for t in report.tasks]
    lines.append(
        _md_row(["chance", *(f"{100 * c:.1f}" for c in chance), f"{100 * sum(chance) / len(chance):.1f}"])
    )
    if report.baseline:
        lines += ["", f"↑ ↓: differs from {report.baseline} (exact McNemar, Holm over tasks, p < {ALPHA})."]
    header = [
        "model",
        "task",
        "n",
        "accuracy",
        "95 % interval",
        *SCORES,
        "macro F1",
        "clean",
        "leaked",
        "shortened",
    ]
    lines += ["", "## Details", "", _md_row(header), _md_row(["---"] * len(header))]
    for r in report.rows:
        interval = f"{100 * r['low']:.1f} to {100 * r['high']:.1f}"
        scores = [f"{100 * r[name]:.1f}" for name in SCORES]
        clean = "" if r["clean_accuracy"] is None else f"{100 * r['clean_accuracy']:.1f}"
        f1 = f"{100 * r['macro_f1']:.1f}"
        cells = [r["model"], r["title"], str(r["n"]), percent(r), interval, *scores, f1, clean]
        lines.append(_md_row([*cells, str(r["leaked"]), str(r["rows_shortened"])]))
    lines += ["", "## Made with", ""] + [f"- {name}: {value}" for name, value in report.metadata.items()]
    return "\n".join(lines) + "\n"


def _md_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(report: Report, model: str, task: str) -> str:
    return {1: " ↑", -1: " ↓", 0: ""}[report.significant(model, task)]


def percent(row: dict[str, Any] | None, name: str = "accuracy") -> str:
    """A share as per cent with one decimal; a dash when there is none."""
    return "\u2013" if row is None or row[name] is None else f"{100 * row[name]:.1f}"
