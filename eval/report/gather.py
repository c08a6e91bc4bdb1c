"""The contents of a report, gathered from files. Nothing here draws."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.config.recipe import read_written
from emo.common.errors import UserError
from emo.common.io.objects import local_directory
from emo.common.io.untrusted import read_json
from emo.common.provenance import code_version, library_versions
from emo.common.report.figure import choose_series
from emo.common.report.numbers import Effect, join_words
from emo.data_prep.config import VALIDATION
from emo.data_prep.selection.similarity.contamination import SHARED
from emo.pipeline.control.run_dir import CONFIG, METRICS, read_metrics

from ..judging.results import JUDGEMENTS, read_judgements
from ..results import stats
from ..results.directory import MODELS, Model, TaskResult, find_model, only_answer, read_models
from ..results.store import STORED_BYTES
from .compare import Comparison, MeanOfDifferences, TaskDifference, compare_models, sort_tasks
from .families import choose_baselines, find_ancestors, group_families
from .judged import compare_judgements

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")


class Report:
    """The contents of all output formats.

    models: those with scores, in order. unscored: those with only text or a log. families: the models by
    base. rows: one per model and task. against: baseline -> model -> comparison. The first baseline is the
    report's. series: of each model in figures, by its objective. recipes: of the runs. remarks: what
    to know before trusting the numbers. skipped: files that could not be read.
    """

    def __init__(
        self, outs: Sequence[Path], runs: Mapping[str, Path] | None = None, chosen: Sequence[str] = (),
        title: str = "", notice: str = "", seeds: Mapping[str, list[str]] | None = None,
    ) -> None:  # fmt: skip
        """Gather the results. Raises UserError if there are none, or none of a named model.

        Args:
            outs: Results directories.
            runs: Model name -> run directory, whose training log is shown.
            chosen: Baselines. By default models are compared with their base models, and with
                MLE from the same origin.
            title: Title of the report.
            notice: A sentence at the end.
            seeds: Label -> names of the models that differ only by their seed.
        """
        runs = runs or {}
        self.notice = notice
        self.chosen = list(dict.fromkeys(chosen))
        self.seeds = dict(seeds or {})
        self.skipped: list[str] = []
        self.judgements = read_judgements(outs, self.skipped.append)
        evaluated = [out for out in outs if (out / MODELS).is_dir() or not (out / JUDGEMENTS).is_dir()]
        models = read_models(evaluated, self.skipped.append)
        for name in [*runs, *chosen, *(name for names in self.seeds.values() for name in names)]:
            find_model(models, name)
        self.tasks = sort_tasks({task for m in models for task in m.results})
        self.measured = sorted({task for m in models for task in m.measures})
        scored = [m for m in models if m.results or m.measures or m.unreadable.keys() & self.tasks]
        others = [m for m in models if m.samples and m not in scored]
        scored, self.unscored = (scored, others) if scored else (others, [])
        if not scored and not self.judgements:
            raise UserError(f"no finished results in {', '.join(map(str, outs))}", code="no-results")
        self.title = title or ("In-context evaluation" if scored else "Answers, judged")
        self.recipes, overlaps, faults = _read_runs([*scored, *self.unscored], runs)
        ancestors = find_ancestors(scored)
        self.families = group_families(scored, ancestors, list(runs), next(iter(chosen), None))
        self.models = [model for family in self.families for model in family.members]
        bases = [family.base for family in self.families]
        trained = ["" if m in bases else str(m.facts.get("objective") or "") for m in self.everyone]
        self.series = dict(zip((m.name for m in self.everyone), choose_series(trained), strict=True))
        self.against = self._compare(scored, ancestors)
        cells = [(model, task) for model in self.models for task in self.tasks if task in model.results]
        self.rows = [_row(model, task, overlaps.get(model.name, {}).get(task)) for model, task in cells]
        uneven = {t for others in self.against.values() for c in others.values() for t in c.uneven}
        self.remarks = [*_remarks(self.everyone, self.tasks, uneven), *_wrong_runs(self.everyone, runs)]
        self.remarks += dict.fromkeys(faults)
        self.remarks += [
            f"{x['title']}: {m.name} reached the length limit in {x['answers_cut']:,} of {x['n']:,} answers."
            for _, m, x in self.harness_results()
            if x["answers_cut"]
        ]
        self.judgement_pairs = compare_judgements(self.judgements, self.skipped)

    def _compare(
        self, scored: Sequence[Model], ancestors: Mapping[str, list[Model]]
    ) -> dict[str, dict[str, Comparison]]:
        pairs = [(find_model(scored, name), self.models) for name in self.chosen]
        if not self.chosen:
            pairs = [pair for family in self.families for pair in choose_baselines(family.members, ancestors)]
        against: dict[str, dict[str, Comparison]] = {}
        for baseline, others in pairs:
            tasks = [*self.tasks, *self.measured]
            comparisons = [compare_models(baseline, m, tasks) for m in others if m is not baseline]
            if by_model := {c.model: c for c in comparisons if c.tasks or c.refused or c.measures}:
                against.setdefault(baseline.name, {}).update(by_model)
        return against

    @property
    def everyone(self) -> list[Model]:
        """The models, followed by those without a score."""
        return [*self.models, *self.unscored]

    @property
    def titles(self) -> dict[str, str]:
        """The tasks with their titles."""
        titles = {row["task"]: row["title"] for row in self.rows}
        return {task: titles[task] for task in self.tasks}

    def harness_results(self, lengths: bool = False) -> list[tuple[str, Model, TaskResult]]:
        """Return task, model and result of lm-eval's tasks, or of measures over lengths, task by task."""
        tasks = [*self.tasks, *self.measured]
        found = [(task, m, m.all_results.get(task)) for task in tasks for m in self.models]
        return [(t, m, x) for t, m, x in found if x and "metrics" in x and ("lengths" in x) == lengths]

    def against_first(self, model: Model) -> Comparison | None:
        """Return the comparison of a model with its first baseline."""
        comparisons = (others.get(model.name) for others in self.against.values())
        return next(filter(None, comparisons), None)

    def chance(self, task: str | None, key: str = "chance") -> float:
        """Return the chance (or the majority label's share) of a task, or the mean over tasks (None)."""
        shares = {row["task"]: row[key] for row in self.rows}  # the same for all models
        return shares[task] if task else sum(shares.values()) / len(shares)

    def level(self, model: Model, task: str | None) -> tuple[float, float, float] | None:
        """Return accuracy, low and high of a model on a task, or of their mean (None) if it has all tasks."""
        results = [model.results.get(t) for t in (self.tasks if task is None else [task])]
        levels = [(r["accuracy"], r["interval"]["low"], r["interval"]["high"]) for r in results if r]
        if not levels or len(levels) < len(results):
            return None
        mean, interval = stats.mean_interval(levels)
        return (mean, interval.low, interval.high) if task is None else levels[0]

    def effects(self, task: str | None, baseline: str | None = None) -> list[Effect]:
        """Return the models' accuracies on a task, or differences from a baseline, in points.

        task: None stands for the mean, of accuracies over all tasks, or of differences over the compared
        tasks. The direction of an accuracy comes from the difference to the model's first baseline.
        """
        effects = []
        for model in self.models:
            c = self.against.get(baseline, {}).get(model.name) if baseline else self.against_first(model)
            complete = c and (baseline or len(c.tasks) == len(self.tasks))
            x: TaskDifference | MeanOfDifferences | None = None
            if c is not None:
                x = c.tasks.get(task) if task else c.mean if complete else None
            level = (x.difference, x.interval.low, x.interval.high) if x else None
            if baseline is None:
                level = self.level(model, task)
            if level:
                direction = x.direction if x else 0
                points = [100 * value for value in level]
                effects.append(Effect(model.name, self.series[model.name], direction, *points))
        return effects

    def over_seeds(self, label: str, task: str | None) -> tuple[float, float | None] | None:
        """Return mean and standard deviation over seeds on a task, or of the mean over tasks (None)."""
        levels = [self.level(find_model(self.models, name), task) for name in self.seeds[label]]
        values = [level[0] for level in levels if level]
        if len(values) < len(levels):
            return None
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the report, for JSON."""
        means = ("mean_accuracy", "mean_low", "mean_high")
        levels = [(model, self.level(model, None) or (None,) * 3) for model in self.everyone]
        pairs = [c for comparisons in self.against.values() for c in comparisons.values()]
        about = [(c, {"model": c.model, "baseline": c.baseline}) for c in pairs]
        tasks = [*self.tasks, None]
        return {
            **{name: getattr(self, name) for name in ("title", "notice", "remarks", "rows", "skipped")},
            "baseline": next(iter(self.against), None),
            "comparisons": [
                {"task": t} | names | asdict(x) for c, names in about for t, x in c.tasks.items()
            ],
            "harness": [
                {"task": t, "model": m.name}
                | {name: x.get(name) for name in ("metrics", "score", "measure", "n", "answers_cut")}
                for t, m, x in self.harness_results()
            ],
            "lengths": [
                {"task": t, "model": m.name, "lengths": x["lengths"], "n": x["n"]}
                for t, m, x in self.harness_results(lengths=True)
            ],
            "measure_comparisons": [
                {"task": t} | names | asdict(x) for c, names in about for t, x in c.measures.items()
            ],
            "mean_comparisons": [
                {"tasks": list(c.tasks)} | names | asdict(c.mean) for c, names in about if c.mean
            ],
            "not_compared": [
                {"task": t, "reason": why} | names for c, names in about for t, why in c.refused.items()
            ],
            "models": [{**m.description, **dict(zip(means, level, strict=True))} for m, level in levels],
            "seeds": {name: {t or "mean": self.over_seeds(name, t) for t in tasks} for name in self.seeds},
            "judgements": [judgement.numbers for judgement in self.judgements],
            "paired_judgements": self.judgement_pairs,
            "metadata": {
                "git": code_version(),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                **library_versions(*VERSIONS),
            },
        }


def _read_runs(
    models: Sequence[Model], runs: Mapping[str, Path]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Container[str]]], list[str]]:
    """Read the training logs of `runs` into `models`.

    Return the recipes, by model and task the test rows in the training text, and remarks on unreadable
    contamination reports.
    """
    recipes, overlaps = [], {}
    faults = list[str]()
    for model in (m for m in models if m.name in runs):
        run = runs[model.name]
        if not (run / METRICS).is_file():
            raise UserError(f"--run: run directory {run} does not exist, or has no {METRICS}", code="no-run")
        # Only the main validation set. The run's own report shows all sets.
        model.metrics = [r for r in read_metrics(run) if r.get("set", VALIDATION) == VALIDATION]
        with contextlib.suppress(OSError, ValueError):
            recipes.append(read_written(run / CONFIG))
            trained_on = model.facts.get("data_fingerprint")
            overlaps[model.name] = _read_contamination(recipes[-1], trained_on, faults)
    return recipes, overlaps, faults


def _read_contamination(
    recipe: dict[str, Any], trained_on: str | None, faults: list[str]
) -> dict[str, Container[str]]:
    """Return by task the digests of test rows that share long passages with the training text, if known.

    Args:
        recipe: The recipe of the run.
        trained_on: Fingerprint of the data that the model was trained on, if its export names it.
        faults: Receives a line if a report cannot be read, or is about other data.
    """
    try:
        directory = local_directory(recipe["data"]["dir"]) / "train"
        overlap = directory / "contamination.json"
        tasks = read_json(overlap, STORED_BYTES)["tasks"].items()
        prepared = trained_on and read_json(directory / "manifest.json", STORED_BYTES)["fingerprint"]
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return {}
    if trained_on != prepared:
        faults.append(f"{directory} was prepared again after training, so {overlap.name} is not shown.")
        return {}
    try:
        return {task: dict(facts[SHARED]) for task, facts in tasks}
    except (LookupError, TypeError, ValueError):
        faults.append(f"{overlap} does not identify rows by their text. Delete it and run emo prepare again.")
        return {}


def _remarks(models: Sequence[Model], tasks: Sequence[str], uneven: Container[str]) -> list[str]:
    """Return remarks on shortened prompts, and on models that give one answer to all rows of a task.

    uneven: tasks whose prompts differ between models. These remarks come first.
    """
    remarks: list[str] = []
    for task in sorted(tasks, key=lambda task: task not in uneven):
        results = {m.name: m.results[task] for m in models if task in m.results}
        title = next(iter(results.values()))["title"]
        if any(result["rows_shortened"] for result in results.values()):
            counts = [f"{name} {r['rows_shortened']:,} of {r['n']:,}" for name, r in results.items()]
            different = ". The models saw different prompts" if task in uneven else ""
            lost = "prompts that lost demonstrations or text to fit the context"
            remarks.append(f"{title}, {lost}: {join_words(counts)}{different}.")
        for name, result in results.items():
            if (answer := only_answer(result)) is not None:
                remarks.append(f"{title}: {name} answers {answer} for every row.")
    return remarks


def _wrong_runs(models: Sequence[Model], runs: Mapping[str, Path]) -> list[str]:
    """Return remarks on runs that do not seem to have trained the models that they are shown for.

    Runs may be moved and renamed, so this compares the path of the weights, the run's name, and the run
    directory that its configuration and the export recorded.
    """
    remarks = []
    for model in (m for m in models if m.name in runs):
        run = runs[model.name]
        made_in = model.facts.get("run")
        path = model.description["path"]
        try:
            recorded = read_written(run / CONFIG).get("output_dir")
        except (OSError, ValueError):
            recorded = None
        same = made_in is not None and (made_in == recorded or Path(made_in).name == run.resolve().name)
        if not same and not Path(path).resolve().is_relative_to(run.resolve()):
            remarks.append(
                f"--run {model.name}={run}: {model.name} seems to come from another run ({made_in or path}). "
                f"The training shown is that of {run}."
            )
    return remarks


def _row(model: Model, task: str, overlap: Container[str] | None) -> dict[str, Any]:
    """Return the numbers of a model on a task, also without the test rows in its training text."""
    result = model.results[task]
    values: Mapping[str, object] = result
    shared = None
    untrained = None
    if overlap is not None and any((records := model.records(task)).texts):
        rows = zip(records.rows, records.correct, records.texts, strict=True)
        others = [(row, right) for row, right, text in rows if text not in overlap]
        groups = [group for (*_, group), _ in others] if result["groups"] else None
        shared = result["n"] - len(others)
        untrained = stats.accuracy([right for _, right in others], groups).value if others else None
    first = ("title", "accuracy", "chance", "majority", "n", "macro_f1", "score")
    counts = ("leaked", "rows_shortened", "rows_cut", "retriever", "shots", "conditions")
    return {
        **{"model": model.name, "task": task, "key": model.views[task]["key"], "prompt": result["version"]},
        **{name: values[name] for name in first},
        **{name: result["interval"][name] for name in ("low", "high")},
        **{name: facts["accuracy"] for name, facts in result["scores"].items()},
        **{name: values[name] for name in counts},
        **{"clean_accuracy": result["clean"]["accuracy"], "trained_on": shared},
        **{"untrained_accuracy": untrained},
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }
