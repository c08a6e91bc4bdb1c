"""Everything that files tell about evaluated models, gathered for a report. Nothing here draws."""

from __future__ import annotations

import platform
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.provenance import code_version, library_versions
from common.recipe import read_written
from common.untrusted import read_json
from data_prep.config import VALIDATION
from eval import stats
from eval.compare import Comparison, compare_pair, in_order
from eval.icl.scores import EXTRA_SCORES, SCORES
from eval.judging.results import Judgement, read_judgements
from eval.report.judged import Pairing, pairings
from eval.report.order import Family, baselines, families
from eval.results import MODELS, Model, only_answer, pick, read_models
from eval.store import STORED_BYTES
from pipeline.run_dir import CONFIG, METRICS, read_metrics

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")


@dataclass
class Report:
    """The contents of all output formats."""

    title: str
    notice: str
    families: list[Family]  # the report's baseline is the first model of the first
    tasks: list[str]
    rows: list[dict[str, Any]]  # one per model x task
    against: dict[str, dict[str, Comparison]]  # baseline -> model -> comparison; the first is the report's
    chosen: bool  # whether the baselines were asked for
    seeds: dict[str, list[str]]  # label -> names of the models that differ by their seed only
    metadata: dict[str, str]
    skipped: list[str]  # files that could not be read
    remarks: list[str]  # what to know before trusting the numbers
    unscored: list[Model]  # with text or a log only, beside models with scores
    judgements: list[Judgement]
    pairings: list[Pairing]

    @property
    def models(self) -> list[Model]:
        """Return the models with scores, in order."""
        return [model for family in self.families for model in family.members]

    @property
    def everyone(self) -> list[Model]:
        """Return the models and, after them, those without a score."""
        return [*self.models, *self.unscored]

    @property
    def baseline(self) -> str | None:
        """Return what the first comparison is with; None where there is nothing to compare."""
        return next(iter(self.against), None)

    @property
    def scores(self) -> list[str]:
        """Return the scores that any row has."""
        return [name for name in (*SCORES, *EXTRA_SCORES) if any(r.get(name) is not None for r in self.rows)]

    def row(self, model: str, task: str) -> dict[str, Any] | None:
        """Return a model's row of a task."""
        return next((r for r in self.rows if (r["model"], r["task"]) == (model, task)), None)

    def of_task(self, task: str) -> dict[str, Any]:
        """Return any row of a task: title, chance and majority are the same for all models."""
        return next(r for r in self.rows if r["task"] == task)

    def compared(self, model: str, task: str | None, baseline: str | None) -> dict[str, Any] | None:
        """Return the difference from a baseline on a task or the mean of all (None), if it was compared."""
        comparison = self.against.get(baseline or "", {}).get(model)
        if comparison is None or task is not None:
            return None if comparison is None else comparison.tasks.get(task or "")
        return comparison.mean if len(comparison.tasks) == len(self.tasks) else None

    def direction(self, model: str, task: str | None) -> int:
        """Return +1 or -1 where a model is surely better or worse than its first baseline, else 0."""
        baseline = next((name for name, models in self.against.items() if model in models), None)
        comparison = self.compared(model, task, baseline)
        return 0 if comparison is None else comparison["direction"]

    @property
    def columns(self) -> list[str | None]:
        """Return what tables have a column for: the mean of several tasks (None), and the tasks."""
        return [*([None] if len(self.tasks) > 1 else []), *self.tasks]

    @property
    def titles(self) -> list[str]:
        """Return how these columns are called."""
        return ["Mean" if task is None else self.of_task(task)["title"] for task in self.columns]

    def chance(self, task: str | None, key: str = "chance") -> float:
        """Return the chance (or the majority label's share) of a task, or the mean over tasks."""
        values = [self.of_task(t)[key] for t in ([task] if task else self.tasks)]
        return sum(values) / len(values)

    def level(self, model: Model, task: str | None) -> tuple[float, float, float] | None:
        """Return accuracy, low and high of a model on a task, or on their mean."""
        if task is None:
            mean = self.mean(model)
            return None if mean is None else (mean[0], mean[1].low, mean[1].high)
        r = self.row(model.name, task)
        return None if r is None else (r["accuracy"], r["low"], r["high"])

    def mean(self, model: Model) -> tuple[float, stats.Interval] | None:
        """Return the mean accuracy over tasks with its interval, of a model that has them all."""
        results = [model.results[t] for t in self.tasks if t in model.results]
        if not results or len(results) != len(self.tasks):
            return None
        return stats.mean_interval(
            [(r["accuracy"], r["interval"]["low"], r["interval"]["high"]) for r in results]
        )

    def over_seeds(self, label: str, task: str | None) -> tuple[float, float | None] | None:
        """Return mean and standard deviation over seeds; task None: of the mean over tasks."""
        members = [pick(self.models, name) for name in self.seeds[label]]
        values: list[float] = []
        for member in members:
            mean = self.mean(member)
            if task is None and mean is not None:
                values.append(mean[0])
            elif task in member.results:
                values.append(member.results[task]["accuracy"])
        return stats.mean_sd(values) if len(values) == len(members) else None


def gather(
    outs: Sequence[Path],
    runs: dict[str, Path],
    chosen: Sequence[str] = (),
    title: str = "",
    notice: str = "",
    seeds: dict[str, list[str]] | None = None,
) -> Report:
    """Return the results under `outs`. runs: model name -> run directory, whose training log is shown.

    chosen: models that all others are compared with; without any, models are compared with those that they
    were trained from, and with MLE from the same origin. Files that cannot be read are skipped and listed.
    Raises UserError where there are no results, or none of a model that is named.
    """
    skipped: list[str] = []
    judgements = read_judgements(outs, skipped.append)
    judged_only = {j.path.parents[1] for j in judgements if not (j.path.parents[1] / MODELS).is_dir()}
    models = read_models([out for out in outs if out not in judged_only], skipped.append)
    for name in [*runs, *chosen, *(n for ns in (seeds or {}).values() for n in ns)]:
        pick(models, name)
    tasks = in_order({task for m in models for task in m.results})
    models = [m for m in models if m.results or m.samples or m.unreadable.keys() & tasks]
    if not models and not judgements:
        raise UserError(f"no finished results in {', '.join(map(str, outs))}")
    overlaps = {}
    for model in models:
        if model.name in runs:
            model.metrics = _metrics(runs[model.name])
            overlaps[model.name] = _contamination(runs[model.name])
    models, unscored = _scored(models, tasks, runs)
    grouped = families(models, list(runs), next(iter(chosen), None))
    models = [model for family in grouped for model in family.members]
    compared = [(pick(models, name), models) for name in dict.fromkeys(chosen)]
    if not chosen:
        compared = [pair for family in grouped for pair in baselines(family)]
    against = {first.name: _comparisons(first, others, tasks) for first, others in compared}
    return Report(
        title=title or ("In-context evaluation" if models else "Answers, judged"),
        notice=notice,
        families=grouped,
        tasks=tasks,
        rows=[_row(m, t, overlaps.get(m.name, {}).get(t)) for m in models for t in tasks if t in m.results],
        against={name: comparisons for name, comparisons in against.items() if comparisons},
        chosen=bool(chosen),
        seeds=seeds or {},
        metadata=metadata(),
        skipped=skipped,
        remarks=[*_degenerate([*models, *unscored], tasks), *_foreign([*models, *unscored], runs)],
        unscored=unscored,
        judgements=judgements,
        pairings=pairings(judgements, skipped),
    )


def _degenerate(models: Sequence[Model], tasks: Sequence[str]) -> list[str]:
    """Return the tasks on which models give one answer whatever the row."""
    answers: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        for model in (m for m in models if task in m.results):
            answer = only_answer(model.results[task])
            if answer is not None:
                answers.setdefault((model.results[task]["title"], answer), []).append(model.name)
    return [
        f"{title}: {', '.join(names)} answer{'s' if len(names) == 1 else ''} {answer} only, whatever the row"
        for (title, answer), names in answers.items()
    ]


def _foreign(models: Sequence[Model], runs: Mapping[str, Path]) -> list[str]:
    """Return the runs that seem not to have made the models that they are shown for."""
    return [
        f"--run {model.name}={runs[model.name]}: {model.name} seems to be of another run "
        f"({model.facts.get('run') or model.description['path']}); the training shown is that of "
        f"{runs[model.name]}"
        for model in models
        if model.name in runs and not _is_of(model, runs[model.name])
    ]


def _is_of(model: Model, run: Path) -> bool:
    """Return whether anything recorded says that the run made the model: runs are moved and renamed."""
    if Path(model.description["path"]).resolve().is_relative_to(run.resolve()):
        return True
    made_in = model.facts.get("run")
    if made_in is None:
        return False
    try:
        recorded = read_written(run / CONFIG).get("run_dir")  # as the trainer wrote it into the export, too
    except (OSError, ValueError, AttributeError, UserError):
        recorded = None
    return made_in == recorded or Path(made_in).name == run.resolve().name


def _scored(models: list[Model], tasks: list[str], runs: Container[str]) -> tuple[list[Model], list[Model]]:
    """Return the models for the tables, and those with text or a log only; all are for tables without scores.

    Text that the same weights wrote under another name goes to the model with scores, if it has none.
    """
    scored = [m for m in models if m.results or m.unreadable.keys() & set(tasks)]
    if not scored:
        return models, []
    unscored = []
    for model in (m for m in models if m not in scored):
        weights = model.description["weights"]
        same = next((m for m in scored if m.description["weights"] == weights and not m.samples), None)
        if same is None or model.name in runs:
            unscored.append(model)
        else:
            same.samples = model.samples
    return scored, unscored


def _comparisons(baseline: Model, models: list[Model], tasks: list[str]) -> dict[str, Comparison]:
    """Return every other model against one of them, where they have tasks in common."""
    comparisons = {m.name: compare_pair(baseline, m, tasks) for m in models if m is not baseline}
    return {name: c for name, c in comparisons.items() if c.tasks or c.refused}


def _metrics(run: Path) -> list[dict[str, float]]:
    if not run.is_dir():
        raise UserError(f"--run: run directory {run} does not exist")
    if not (run / METRICS).is_file():
        raise UserError(f"--run: {run} holds no {METRICS}")
    # Of several validation sets none stands for the others; the run's own report shows them all.
    return [record for record in read_metrics(run) if record.get("set", VALIDATION) == VALIDATION]


def _contamination(run: Path) -> dict[str, Container[str]]:
    """Return by task the test rows that share long passages with the training text, if that was checked."""
    try:
        config = read_written(run / CONFIG)
        overlap = Path(config["data"]["dir"]) / "train" / "contamination.json"
        tasks = read_json(overlap, STORED_BYTES)["tasks"].items()
        return {task: dict(facts["overlapping_rows"]) for task, facts in tasks}
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _row(model: Model, task: str, overlap: Container[str] | None) -> dict[str, Any]:
    result = model.results[task]
    return {
        "model": model.name,
        "task": task,
        "title": result["title"],
        "accuracy": result["accuracy"],
        "low": result["interval"]["low"],
        "high": result["interval"]["high"],
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
        "conditions": result["conditions"],
        "key": model.keys[task],
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }


def _overlapping(model: Model, task: str, overlap: Container[str] | None) -> dict[str, Any]:
    """Return how many test rows share passages with the training text, and the accuracy without them."""
    if overlap is None:
        return {"trained_on": None, "untrained_accuracy": None}
    records = model.records(task)
    others = [r for r in records if str(r["id"]) not in overlap]
    groups = [r["group"] for r in others] if model.results[task]["groups"] else None
    right = [r["prediction"] == r["gold"] for r in others]
    value = stats.accuracy(right, groups).value if others else None
    return {"trained_on": len(records) - len(others), "untrained_accuracy": value}


def metadata() -> dict[str, str]:
    """Return where and with what a report was made."""
    return {
        "git": code_version(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **library_versions(*VERSIONS),
    }


def as_json(report: Report) -> dict[str, Any]:
    """Return the numbers of the report."""
    means = ("mean_accuracy", "mean_low", "mean_high")
    levels = [(model, report.level(model, None) or (None,) * 3) for model in report.everyone]
    pairs = [c for comparisons in report.against.values() for c in comparisons.values()]
    about = [(c, {"model": c.model, "baseline": c.baseline}) for c in pairs]
    return {
        "title": report.title,
        "notice": report.notice,
        "remarks": report.remarks,
        "rows": report.rows,
        "baseline": report.baseline,
        "comparisons": [{"task": t} | first | x for c, first in about for t, x in c.tasks.items()],
        "mean_comparisons": [{"tasks": list(c.tasks)} | first | c.mean for c, first in about if c.mean],
        "not_compared": [
            {"task": t, "reason": reason} | first for c, first in about for t, reason in c.refused.items()
        ],
        "models": [m.description | dict(zip(means, level, strict=True)) for m, level in levels],
        "seeds": {
            label: {task or "mean": report.over_seeds(label, task) for task in (*report.tasks, None)}
            for label in report.seeds
        },
        "judgements": [judgement.numbers for judgement in report.judgements],
        "paired_judgements": [vars(pairing) for pairing in report.pairings],
        "skipped": report.skipped,
        "metadata": report.metadata,
    }
