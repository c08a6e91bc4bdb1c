"""Everything that files tell about evaluated models, gathered for a report. Nothing here draws."""

from __future__ import annotations

import platform
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emo.common.errors import UserError
from emo.common.provenance import code_version, library_versions
from emo.common.recipe import read_written
from emo.common.untrusted import read_json
from emo.data_prep.config import VALIDATION
from emo.eval import stats
from emo.eval.compare import Comparison, compare_pair, in_order
from emo.eval.judging.results import Judgement, read_judgements
from emo.eval.report.judged import pairings
from emo.eval.results import MODELS, Model, only_answer, pick, read_models
from emo.eval.store import STORED_BYTES
from emo.pipeline.run_dir import CONFIG, METRICS, read_metrics

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")
NEW = "new"  # what an export of a model trained from scratch calls its origin
OBJECTIVES = {"mle": "MLE", "tailr": "TaiLr", "mixce": "MixCE", "emo": "EMO"}  # the paper's, in its order
WEIGHTS = ("export", "hf")  # directories of weights, whose names say nothing about the model


class Family(NamedTuple):
    """Models that were trained from one, by one stage of training or several."""

    title: str  # of the base; empty where nothing is known
    base: Model | None  # None: it was not evaluated
    members: list[Model]  # the base is the first


@dataclass
class Report:
    """The contents of all output formats."""

    title: str
    notice: str
    families: list[Family]  # the report's baseline is the first model of the first
    tasks: list[str]
    rows: list[dict[str, Any]]  # one per model x task
    against: dict[str, dict[str, Comparison]]  # baseline -> model -> comparison; the first is the report's
    chosen: bool  # whether the user named the baselines
    seeds: dict[str, list[str]]  # label -> names of the models that differ by their seed only
    skipped: list[str]  # files that could not be read
    remarks: list[str]  # what to know before trusting the numbers
    unscored: list[Model]  # with text or a log only, beside models with scores
    judgements: list[Judgement]
    pairings: list[dict[str, Any]]

    @property
    def models(self) -> list[Model]:
        """Return the models with scores, in order."""
        return [model for family in self.families for model in family.members]

    @property
    def everyone(self) -> list[Model]:
        """Return the models and, after them, those without a score."""
        return [*self.models, *self.unscored]

    @property
    def titles(self) -> dict[str, str]:
        """Return the tasks with their titles."""
        return {row["task"]: row["title"] for task in self.tasks for row in self.rows if row["task"] == task}

    @property
    def columns(self) -> dict[str | None, str]:
        """Return what tables have a column for, with titles: the mean of several tasks (None), the tasks."""
        mean: dict[str | None, str] = {None: "Mean"} if len(self.tasks) > 1 else {}
        return mean | self.titles

    def compared(self, model: str, task: str | None, baseline: str) -> dict[str, Any] | None:
        """Return the difference from a baseline on a task or the mean of all (None), if it was compared."""
        comparison = self.against[baseline].get(model)
        if comparison is None or task is not None:
            return None if comparison is None else comparison.tasks.get(task or "")
        return comparison.mean if len(comparison.tasks) == len(self.tasks) else None

    def chance(self, task: str | None, key: str = "chance") -> float:
        """Return the chance (or the majority label's share) of a task, or the mean over tasks."""
        shares = {row["task"]: row[key] for row in self.rows}  # the same for all models
        return shares[task] if task else sum(shares.values()) / len(shares)

    def level(self, model: Model, task: str | None) -> tuple[float, float, float] | None:
        """Return accuracy, low and high of a model on a task, or their mean (None) where it has all tasks."""
        results = [model.results.get(t) for t in (self.tasks if task is None else [task])]
        levels = [(r["accuracy"], r["interval"]["low"], r["interval"]["high"]) for r in results if r]
        if not levels or len(levels) < len(results):
            return None
        mean, interval = stats.mean_interval(levels)
        return (mean, interval.low, interval.high) if task is None else levels[0]

    def over_seeds(self, label: str, task: str | None) -> tuple[float, float | None] | None:
        """Return mean and standard deviation over seeds; task None: of the mean over tasks."""
        levels = [self.level(pick(self.models, name), task) for name in self.seeds[label]]
        if None in levels:
            return None
        values = [level[0] for level in levels if level]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


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
    for model in (m for m in models if m.name in runs):
        run = runs[model.name]
        if not (run / METRICS).is_file():
            raise UserError(f"--run: run directory {run} does not exist, or has no {METRICS}")
        # Of several validation sets none stands for the others; the run's own report shows them all.
        model.metrics = [r for r in read_metrics(run) if r.get("set", VALIDATION) == VALIDATION]
        overlaps[model.name] = _contamination(run)
    models, unscored = _scored(models, tasks, runs)
    above = parents(models)
    grouped = families(models, above, list(runs), next(iter(chosen), None))
    models = [model for family in grouped for model in family.members]
    compared = [(pick(models, name), models) for name in dict.fromkeys(chosen)]
    if not chosen:
        compared = [pair for family in grouped for pair in baselines(family, above)]
    against = {}
    for first, others in compared:
        pairs = {m.name: compare_pair(first, m, tasks) for m in others if m is not first}
        against[first.name] = {name: c for name, c in pairs.items() if c.tasks or c.refused}
    return Report(
        title=title or ("In-context evaluation" if models else "Answers, judged"),
        notice=notice,
        families=grouped,
        tasks=tasks,
        rows=[_row(m, t, overlaps.get(m.name, {}).get(t)) for m in models for t in tasks if t in m.results],
        against={name: comparisons for name, comparisons in against.items() if comparisons},
        chosen=bool(chosen),
        seeds=seeds or {},
        skipped=skipped,
        remarks=_remarks([*models, *unscored], tasks, runs),
        unscored=unscored,
        judgements=judgements,
        pairings=pairings(judgements, skipped),
    )


def parents(models: Sequence[Model]) -> dict[str, str]:
    """Return the evaluated model that each was trained from, both by name; models without one are left out.

    The best match counts: the same path, the run that left the origin, a path that ends alike (results and
    runs are moved), the last checkpoint of that run, and the same name of a model that was trained elsewhere.
    """
    above: dict[str, str] = {}
    for model in (m for m in models if _origin(m)):
        origin, ranked = Path(_origin(model)), []
        for other in (m for m in models if m is not model and model.name not in _ancestors(m.name, above)):
            path, run = Path(other.description["path"]), other.facts.get("run")
            short, long = sorted((path.parts, origin.parts), key=len)
            matches = (
                path == origin or (path.exists() and path.resolve() == origin.resolve()),
                run and str(origin) in (f"{run}/{name}" for name in WEIGHTS),
                len(short) > 1 and long[-len(short) :] == short,
                not other.facts.get("objective") and _short(str(path)) == _short(str(origin)),
            )
            if any(matches):
                ranked.append((-list(map(bool, matches)).index(True), _step(other), other.name))
        if ranked:
            above[model.name] = max(ranked)[2]
    return above


def families(
    models: Sequence[Model], above: Mapping[str, str], first: Sequence[str], baseline: str | None
) -> list[Family]:
    """Return all models by base; the family of `baseline`, and in it the baseline, come first.

    above: of `parents`. Models named in `first` precede others of their family.
    """

    def sort_key(model: Model) -> tuple[Any, ...]:
        objective = str(model.facts.get("objective") or "")
        rank = [*OBJECTIVES, objective].index(objective)
        order = first.index(model.name) if model.name in first else len(first)
        natural = [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", model.name)]
        in_family = (model.name in above, order, bool(objective), rank, _step(model), natural)
        return (model.name != baseline, *in_family)

    grouped: dict[tuple[bool, str], list[Model]] = {}  # by whether the base was evaluated, and its name
    for model in sorted(models, key=sort_key):
        root = pick(models, [model.name, *_ancestors(model.name, above)][-1])
        is_base = root.name in above.values()
        grouped.setdefault((is_base, root.name if is_base else _origin(root)), []).append(model)
    result = []
    for (is_base, name), members in grouped.items():
        base = pick(models, name) if is_base else None
        members.sort(key=lambda m: (m.name != baseline, m is not base))
        result.append(Family(name if is_base else _short(name), base, members))
    return result


def baselines(family: Family, above: Mapping[str, str]) -> list[tuple[Model, list[Model]]]:
    """Return what members are compared with by default, and which: with every model that others were trained
    from, and with MLE on the same data from the same origin; without either with the first."""
    members = family.members
    pairs = [(m, [x for x in members if m.name in _ancestors(x.name, above)]) for m in members]
    pairs = [(model, below) for model, below in pairs if below]
    stages: dict[tuple[Any, Any], list[Model]] = {}
    for model in members:
        if model.facts.get("objective") and not any(model is parent for parent, _ in pairs[:1]):
            start = model.facts.get("origin"), model.facts.get("data_fingerprint")
            stages.setdefault(start, []).append(model)
    for stage in stages.values():
        mle = max((m for m in stage if m.facts["objective"] == "mle"), key=_step, default=None)
        others = [m for m in stage if m.facts["objective"] != "mle"]
        if mle is not None and others:
            pairs.append((mle, others))
    return pairs or ([(members[0], members[1:])] if len(members) > 1 else [])


def _ancestors(name: str, above: Mapping[str, str]) -> list[str]:
    """Return the models that one was trained from, the nearest first."""
    return [above[name], *_ancestors(above[name], above)] if name in above else []


def _step(model: Model) -> int:
    return int(model.facts.get("step") or 0)


def _origin(model: Model) -> str:
    """Return what a model was trained from; empty for nothing."""
    origin = str(model.facts.get("origin") or NEW)
    return "" if origin == NEW else origin


def _short(path: str) -> str:
    """Return models/llama-7b as llama-7b, and runs/a/export as a."""
    names = [name for name in Path(path).parts if name not in WEIGHTS]
    return names[-1] if names else path


def _remarks(models: Sequence[Model], tasks: Sequence[str], runs: Mapping[str, Path]) -> list[str]:
    """Return the tasks on which models give one answer whatever the row, and runs that seem not to have made
    the models that they are shown for.

    Runs are moved and renamed: the path of the weights, the run's name and the run_dir that its configuration
    and the export recorded are compared.
    """
    answers: dict[tuple[str, str], list[str]] = {}
    for task, model in ((t, m) for t in tasks for m in models if t in m.results):
        if (answer := only_answer(model.results[task])) is not None:
            answers.setdefault((model.results[task]["title"], answer), []).append(model.name)
    remarks = [
        f"{title}: {', '.join(names)} answer{'s' if len(names) == 1 else ''} {answer} only, whatever the row"
        for (title, answer), names in answers.items()
    ]
    for model in (m for m in models if m.name in runs):
        run, made_in, path = runs[model.name], model.facts.get("run"), model.description["path"]
        try:
            recorded = read_written(run / CONFIG).get("output_dir")
        except (OSError, ValueError):
            recorded = None
        alike = made_in is not None and (made_in == recorded or Path(made_in).name == run.resolve().name)
        if not alike and not Path(path).resolve().is_relative_to(run.resolve()):
            remarks.append(
                f"--run {model.name}={run}: {model.name} seems to be of another run ({made_in or path}); the "
                f"training shown is that of {run}"
            )
    return remarks


def _scored(models: list[Model], tasks: list[str], runs: Container[str]) -> tuple[list[Model], list[Model]]:
    """Return the models for the tables, and those with text or a log only; all are for tables without scores.

    Text that the same weights wrote under another name goes to the model with scores, if it has none.
    """
    scored = [m for m in models if m.results or m.unreadable.keys() & set(tasks)]
    unscored = []
    for model in (m for m in models if scored and m not in scored):
        weights = model.description["weights"]
        same = next((m for m in scored if m.description["weights"] == weights and not m.samples), None)
        if same is None or model.name in runs:
            unscored.append(model)
        else:
            same.samples = model.samples
    return scored or models, unscored


def _contamination(run: Path) -> dict[str, Container[str]]:
    """Return by task the test rows that share long passages with the training text, if that was checked."""
    try:
        overlap = Path(read_written(run / CONFIG)["data"]["dir"]) / "train" / "contamination.json"
        tasks = read_json(overlap, STORED_BYTES)["tasks"].items()
        return {task: dict(facts["overlapping_rows"]) for task, facts in tasks}
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return {}


def _row(model: Model, task: str, overlap: Container[str] | None) -> dict[str, Any]:
    """Return the numbers of a model on a task, also without test rows that are in its training text."""
    result, shared, value = model.results[task], None, None
    if overlap is not None:
        records = model.records(task)
        others = [r for r in records if str(r["id"]) not in overlap]
        groups = [r["group"] for r in others] if result["groups"] else None
        right = [r["prediction"] == r["gold"] for r in others]
        shared = len(records) - len(others)
        value = stats.accuracy(right, groups).value if others else None
    counts = ("leaked", "rows_shortened", "rows_cut", "retriever", "shots", "conditions")
    return {
        **{"model": model.name, "task": task, "key": model.views[task]["key"], "prompt": result["version"]},
        **{
            name: result[name]
            for name in ("title", "accuracy", "chance", "majority", "n", "macro_f1", "score")
        },
        **{name: result["interval"][name] for name in ("low", "high")},
        **{name: facts["accuracy"] for name, facts in result["scores"].items()},
        **{name: result[name] for name in counts},
        **{"clean_accuracy": result["clean"]["accuracy"], "trained_on": shared, "untrained_accuracy": value},
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }


def as_json(report: Report) -> dict[str, Any]:
    """Return the numbers of the report."""
    means = ("mean_accuracy", "mean_low", "mean_high")
    levels = [(model, report.level(model, None) or (None,) * 3) for model in report.everyone]
    pairs = [c for comparisons in report.against.values() for c in comparisons.values()]
    about = [(c, {"model": c.model, "baseline": c.baseline}) for c in pairs]
    refusals = [({"task": t, "reason": why}, first) for c, first in about for t, why in c.refused.items()]
    tasks = [*report.tasks, None]
    return {
        **{name: getattr(report, name) for name in ("title", "notice", "remarks", "rows", "skipped")},
        "baseline": next(iter(report.against), None),
        "comparisons": [{"task": t} | first | x for c, first in about for t, x in c.tasks.items()],
        "mean_comparisons": [{"tasks": list(c.tasks)} | first | c.mean for c, first in about if c.mean],
        "not_compared": [refusal | first for refusal, first in refusals],
        "models": [m.description | dict(zip(means, level, strict=True)) for m, level in levels],
        "seeds": {name: {t or "mean": report.over_seeds(name, t) for t in tasks} for name in report.seeds},
        "judgements": [judgement.numbers for judgement in report.judgements],
        "paired_judgements": report.pairings,
        "metadata": {
            "git": code_version(),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            **library_versions(*VERSIONS),
        },
    }
