"""Everything known about evaluated models, gathered from files and written as JSON, Markdown and HTML."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.provenance import code_version, library_versions
from eval import stats, store
from eval.compare import ALPHA, Model, compare_models, in_order, pick, read_models
from eval.icl.scores import EXTRA_SCORES, SCORES

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")


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
    seeds: dict[str, list[str]]  # label -> names of the models that differ by their seed only
    metadata: dict[str, Any]

    def row(self, model: str, task: str) -> dict[str, Any] | None:
        return next((r for r in self.rows if (r["model"], r["task"]) == (model, task)), None)

    def of_task(self, task: str) -> dict[str, Any]:
        """Any row of a task: title, chance and majority are the same for all models."""
        return next(r for r in self.rows if r["task"] == task)

    @property
    def scores(self) -> list[str]:
        """The scores that any row has."""
        return [name for name in (*SCORES, *EXTRA_SCORES) if any(r.get(name) is not None for r in self.rows)]

    def significant(self, model: str, task: str) -> int:
        """+1 / -1: better / worse than the baseline after Holm's correction; 0: cannot be told."""
        for c in self.comparisons:
            if (c["model"], c["task"]) == (model, task) and c["p_holm"] < ALPHA:
                return 1 if c["difference"] > 0 else -1
        return 0

    def over_seeds(self, label: str, task: str | None) -> tuple[float, float | None] | None:
        """Mean and standard deviation of the accuracy over seeds; task None: of the mean over tasks."""
        members = [pick(self.models, name) for name in self.seeds[label]]
        if task is None:
            values = [mean_accuracy(self, m) for m in members]
        else:
            values = [m.results.get(task, {}).get("accuracy") for m in members]
        return None if None in values else stats.mean_sd([v for v in values if v is not None])


def gather(
    outs: Sequence[Path],
    runs: dict[str, Path],
    baseline: str | None = None,
    title: str = "",
    notice: str = "",
    seeds: dict[str, list[str]] | None = None,
) -> Report:
    """Read the results under `outs`. runs: model name -> run directory, whose training log is shown.

    Models come in the order of `runs`, then by training step and name. UserError when there is nothing.
    """
    models = read_models(outs)
    for name in [*runs, *([baseline] if baseline else []), *(n for ns in (seeds or {}).values() for n in ns)]:
        pick(models, name)
    order = {name: i for i, name in enumerate(runs)}
    models.sort(key=lambda m: (order.get(m.name, len(order)), m.facts.get("step") or 0, m.name))
    models = [m for m in models if m.results or m.samples]
    if not models:
        raise UserError(f"no finished results in {', '.join(map(str, outs))}")
    overlaps = {}
    for model in models:
        if model.name in runs:
            model.metrics = _metrics(runs[model.name])
            overlaps[model.name] = _contamination(runs[model.name])
    tasks = in_order({task for m in models for task in m.results})
    first = baseline or models[0].name
    comparisons = compare_models(models, first, tasks)
    rows = [_row(m, t, overlaps.get(m.name, {}).get(t)) for m in models for t in tasks if t in m.results]
    return Report(
        title=title or "In-context evaluation",
        notice=notice,
        models=models,
        tasks=tasks,
        rows=rows,
        comparisons=comparisons,
        baseline=first if comparisons else None,
        seeds=seeds or {},
        metadata=metadata(),
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


def _contamination(run: Path) -> dict[str, dict[str, Any]]:
    """Task -> which test rows share long word sequences with the run's training text, if that was checked."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text())
        overlap = Path(config["data"]["dir"]) / "train" / "contamination.json"
        return json.loads(overlap.read_text())["tasks"]
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return {}


def _row(model: Model, task: str, overlap: dict[str, Any] | None) -> dict[str, Any]:
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
        **{name: facts["accuracy"] for name, facts in result["scores"].items()},
        "score": result["score"],
        "leaked": result["leaked"],
        "clean_accuracy": result["clean"]["accuracy"],
        **_overlapping(model, task, overlap),
        "rows_shortened": result["rows_shortened"],
        "rows_cut": result["rows_cut"],
        "prompt": result["version"],
        "retriever": result["retriever"],
        "shots": result["shots"],
        "key": model.keys[task],
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }


def _overlapping(model: Model, task: str, overlap: dict[str, Any] | None) -> dict[str, Any]:
    """Test rows that stand in part in the training text, and the accuracy without them. None: not checked."""
    if overlap is None:
        return {"trained_on": None, "untrained_accuracy": None}
    flagged = overlap["overlapping_rows"]
    records = model.records(task)
    rest = [r for r in records if str(r["id"]) not in flagged]
    groups = [r["group"] for r in rest] if model.results[task]["groups"] else None
    right = [r["prediction"] == r["gold"] for r in rest]
    value = stats.accuracy(right, groups).value if rest else None
    return {"trained_on": len(records) - len(rest), "untrained_accuracy": value}


def metadata() -> dict[str, Any]:
    """Where and with what a report was made."""
    return {
        "git": code_version(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **library_versions(*VERSIONS),
    }


def write(report: Report, target: Path) -> None:
    """report.html, report.md and results.json in `target`."""
    from eval.report.page import html

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
        "seeds": {
            label: {task or "mean": report.over_seeds(label, task) for task in (*report.tasks, None)}
            for label in report.seeds
        },
        "metadata": report.metadata,
    }


def mean_accuracy(report: Report, model: Model) -> float | None:
    """Mean over tasks, for models that have them all."""
    values = [model.results[t]["accuracy"] for t in report.tasks if t in model.results]
    return sum(values) / len(values) if values and len(values) == len(report.tasks) else None


def markdown(report: Report) -> str:
    """The main tables as Markdown."""
    lines = [f"# {report.title}", ""]
    if report.notice:
        lines += [f"> {report.notice}", ""]
    lines += ["Accuracy in per cent", ""]
    lines += _md_header(["model", *(report.of_task(t)["title"] for t in report.tasks), "mean"])
    for model in report.models:
        cells = [percent(report.row(model.name, t)) + _mark(report, model.name, t) for t in report.tasks]
        lines.append(_md_row([model.name, *cells, _percent(mean_accuracy(report, model))]))
    for label, names in report.seeds.items():
        cells = [spread(report.over_seeds(label, t)) for t in (*report.tasks, None)]
        lines.append(_md_row([f"{label} ({len(names)} seeds)", *cells]))
    for name in ("chance", "majority"):
        values = [report.of_task(t)[name] for t in report.tasks]
        lines.append(_md_row([name, *map(_percent, [*values, sum(values) / max(len(values), 1)])]))
    if report.baseline:
        lines += ["", f"↑ ↓: differs from {report.baseline} (exact McNemar, Holm over tasks, p < {ALPHA})."]
    columns = ["macro_f1", "clean_accuracy", "leaked", "trained_on", "untrained_accuracy"]
    columns += ["rows_shortened", "rows_cut"]
    lines += ["", "## Details", ""]
    lines += _md_header(["model", "task", "n", "accuracy", "95 % interval", *report.scores, *columns])
    for r in report.rows:
        interval = f"{_percent(r['low'])} to {_percent(r['high'])}"
        shares = [percent(r, name) for name in report.scores]
        rest = [str(r[c]) if isinstance(r[c], int) else percent(r, c) for c in columns]
        lines.append(_md_row([r["model"], r["title"], str(r["n"]), percent(r), interval, *shares, *rest]))
    lines += ["", "## Made with", ""] + [f"- {name}: {value}" for name, value in report.metadata.items()]
    return "\n".join(lines) + "\n"


def _md_header(cells: list[str]) -> list[str]:
    return [_md_row(cells), _md_row(["---"] * len(cells))]


def _md_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(report: Report, model: str, task: str) -> str:
    return {1: " ↑", -1: " ↓", 0: ""}[report.significant(model, task)]


def percent(row: dict[str, Any] | None, name: str = "accuracy") -> str:
    """A share of a row in per cent; a dash when there is none."""
    return _percent(None if row is None else row.get(name))


def _percent(value: float | None) -> str:
    return "\u2013" if value is None else f"{100 * value:.1f}"


def spread(found: tuple[float, float | None] | None) -> str:
    """Mean and standard deviation over seeds, in per cent."""
    if found is None:
        return "\u2013"
    mean, deviation = found
    return _percent(mean) if deviation is None else f"{_percent(mean)} ± {_percent(deviation)}"
