"""Everything that files tell about evaluated models, gathered for a report. Nothing here draws."""

from __future__ import annotations

import platform
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from emo.common.config.recipe import read_written
from emo.common.errors import UserError
from emo.common.io.untrusted import read_json
from emo.common.provenance import code_version, library_versions
from emo.common.report.numbers import Effect
from emo.data_prep.config import VALIDATION
from emo.data_prep.selection.contamination import SHARED
from emo.pipeline.control.run_dir import CONFIG, METRICS, read_metrics

from ..judging.results import JUDGEMENTS, read_judgements
from ..results import stats
from ..results.compare import Comparison, compare_pair, in_order
from ..results.directory import MODELS, Model, natural, only_answer, pick, read_models
from ..results.store import STORED_BYTES
from .judged import pairings

VERSIONS = ("torch", "transformers", "deepspeed", "datasets", "openicl", "sentence-transformers")
NEW = "new"  # what an export of a model trained from scratch calls its origin
OBJECTIVES = {"mle": "MLE", "tailr": "TaiLr", "mixce": "MixCE", "emo": "EMO"}  # the paper's, in its order
WEIGHTS = ("export", "hf")  # directories of weights, whose names say nothing about the model


class Family(NamedTuple):
    """Models that were trained from one, by one stage of training or several."""

    title: str  # of the base; empty where nothing is known
    base: Model | None  # None: it was not evaluated
    members: list[Model]  # the base is the first


class Report:
    """The contents of all output formats.

    models: those with scores, in order; `unscored` have text or a log only. families: the same, by base.
    rows: one per model x task. against: baseline -> model -> comparison; the first baseline is the report's.
    remarks: what to know before trusting the numbers. skipped: files that could not be read.
    """

    def __init__(
        self,
        outs: Sequence[Path],
        runs: Mapping[str, Path] | None = None,
        chosen: Sequence[str] = (),
        title: str = "",
        notice: str = "",
        seeds: Mapping[str, list[str]] | None = None,
    ) -> None:
        """Gather the results under `outs`. runs: model name -> run directory, whose training log is shown.

        chosen: models that all others are compared with; without any, models are compared with those that
        they were trained from, and with MLE from the same origin. seeds: label -> names of the models that
        differ by their seed only. Raises UserError where there are no results, or none of a model in these.
        """
        runs = runs or {}
        self.notice, self.chosen, self.seeds = notice, list(dict.fromkeys(chosen)), dict(seeds or {})
        self.skipped: list[str] = []
        self.judgements = read_judgements(outs, self.skipped.append)
        evaluated = [out for out in outs if (out / MODELS).is_dir() or not (out / JUDGEMENTS).is_dir()]
        models = read_models(evaluated, self.skipped.append)
        for name in [*runs, *chosen, *(name for names in self.seeds.values() for name in names)]:
            pick(models, name)
        self.tasks = in_order({task for m in models for task in m.results})
        scored = [m for m in models if m.results or m.unreadable.keys() & self.tasks]
        others = [m for m in models if m.samples and m not in scored]
        scored, self.unscored = (scored, others) if scored else (others, [])
        if not scored and not self.judgements:
            raise UserError(f"no finished results in {', '.join(map(str, outs))}")
        self.title = title or ("In-context evaluation" if scored else "Answers, judged")
        overlaps, faults = {}, list[str]()
        for model in (m for m in [*scored, *self.unscored] if m.name in runs):
            run = runs[model.name]
            if not (run / METRICS).is_file():
                raise UserError(f"--run: run directory {run} does not exist, or has no {METRICS}")
            # Of several validation sets none stands for the others; the run's own report shows them all.
            model.metrics = [r for r in read_metrics(run) if r.get("set", VALIDATION) == VALIDATION]
            overlaps[model.name] = _contamination(run, faults)
        above = ancestors(scored)
        self.families = families(scored, above, list(runs), next(iter(chosen), None))
        self.models = [model for family in self.families for model in family.members]
        compared = [(pick(scored, name), self.models) for name in self.chosen]
        if not chosen:
            compared = [pair for family in self.families for pair in baselines(family.members, above)]
        self.against: dict[str, dict[str, Comparison]] = {}
        for first, others in compared:
            pairs = [compare_pair(first, m, self.tasks) for m in others if m is not first]
            if comparisons := {c.model: c for c in pairs if c.tasks or c.refused}:
                self.against[first.name] = comparisons
        cells = [(model, task) for model in self.models for task in self.tasks if task in model.results]
        self.rows = [_row(model, task, overlaps.get(model.name, {}).get(task)) for model, task in cells]
        self.remarks = [*_remarks(self.everyone, self.tasks, runs), *dict.fromkeys(faults)]
        self.pairings = pairings(self.judgements, self.skipped)

    @property
    def everyone(self) -> list[Model]:
        """Return the models and, after them, those without a score."""
        return [*self.models, *self.unscored]

    @property
    def titles(self) -> dict[str, str]:
        """Return the tasks with their titles."""
        titles = {row["task"]: row["title"] for row in self.rows}
        return {task: titles[task] for task in self.tasks}

    def chance(self, task: str | None, key: str = "chance") -> float:
        """Return the chance (or the majority label's share) of a task, or the mean over tasks."""
        shares = {row["task"]: row[key] for row in self.rows}  # the same for all models
        return shares[task] if task else sum(shares.values()) / len(shares)

    def level(self, model: Model, task: str | None) -> tuple[float, float, float] | None:
        """Return accuracy, low and high of a model on a task, or their mean (None) where it has all tasks."""
        results = [model.results.get(t) for t in (self.tasks if task is None else [task])]
        levels = [_levels(result, "accuracy") for result in results if result]
        if not levels or len(levels) < len(results):
            return None
        mean, interval = stats.mean_interval(levels)
        return (mean, interval.low, interval.high) if task is None else levels[0]

    def effects(self, task: str | None, baseline: str | None = None) -> list[Effect]:
        """Return the models' accuracies on a task, or differences from a baseline, in points.

        task None: the mean, of accuracies over all tasks, of differences over those that were compared.
        direction: of the difference, for accuracies from the model's first baseline.
        """
        effects = []
        for i, model in enumerate(self.models):
            first = next((name for name, others in self.against.items() if model.name in others), "")
            c = self.against.get(baseline or first, {}).get(model.name)
            whole = c and (baseline or len(c.tasks) == len(self.tasks))
            x = (c.tasks.get(task) if task else c.mean if whole else None) if c else None
            level = self.level(model, task) if baseline is None else x and _levels(x, "difference")
            if level:
                direction = x["direction"] if x else 0
                effects.append(Effect(model.name, i, direction, *(100 * value for value in level)))
        return effects

    def over_seeds(self, label: str, task: str | None) -> tuple[float, float | None] | None:
        """Return mean and standard deviation over seeds; task None: of the mean over tasks."""
        levels = [self.level(pick(self.models, name), task) for name in self.seeds[label]]
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
            "comparisons": [{"task": t} | names | x for c, names in about for t, x in c.tasks.items()],
            "mean_comparisons": [{"tasks": list(c.tasks)} | names | c.mean for c, names in about if c.mean],
            "not_compared": [
                {"task": t, "reason": why} | names for c, names in about for t, why in c.refused.items()
            ],
            "models": [m.description | dict(zip(means, level, strict=True)) for m, level in levels],
            "seeds": {name: {t or "mean": self.over_seeds(name, t) for t in tasks} for name in self.seeds},
            "judgements": [judgement.numbers for judgement in self.judgements],
            "paired_judgements": self.pairings,
            "metadata": {
                "git": code_version(),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                **library_versions(*VERSIONS),
            },
        }


def ancestors(models: Sequence[Model]) -> dict[str, list[Model]]:
    """Return the evaluated models that each was trained from, by name, the nearest first.

    The best match counts: the same path, the run that left the origin, a path that ends alike (results and
    runs are moved), the last checkpoint of that run, and the same name of a model that was trained elsewhere.
    """
    above: dict[str, Model] = {}

    def chain(model: Model) -> list[Model]:
        return [above[model.name], *chain(above[model.name])] if model.name in above else []

    for model in (m for m in models if _origin(m)):
        origin, ranked = Path(_origin(model)), list[tuple[int, int, str, Model]]()
        for other in (m for m in models if model not in (m, *chain(m))):
            path, run = Path(other.description["path"]), other.facts.get("run")
            short, long = sorted((path.parts, origin.parts), key=len)
            matches = [
                path == origin or (path.exists() and path.resolve() == origin.resolve()),
                bool(run) and str(origin) in (f"{run}/{name}" for name in WEIGHTS),
                len(short) > 1 and long[-len(short) :] == short,
                not other.facts.get("objective") and _short(str(path)) == _short(str(origin)),
            ]
            if any(matches):
                ranked.append((-matches.index(True), _step(other), other.name, other))
        if ranked:
            above[model.name] = max(ranked)[-1]
    return {model.name: chain(model) for model in models}


def families(
    models: Sequence[Model], above: Mapping[str, list[Model]], first: Sequence[str], baseline: str | None
) -> list[Family]:
    """Return all models by base; the family of `baseline`, and in it the baseline, come first.

    above: their `ancestors`. Models named in `first` precede others of their family.
    """

    def sort_key(model: Model) -> tuple[Any, ...]:
        objective = str(model.facts.get("objective") or "")
        rank = [*OBJECTIVES, objective].index(objective)
        order = first.index(model.name) if model.name in first else len(first)
        in_family = (bool(above[model.name]), order, bool(objective), rank, _step(model), natural(model.name))
        return (model.name != baseline, *in_family)

    bases = {chain[-1].name: chain[-1] for chain in above.values() if chain}
    grouped: dict[tuple[bool, str], list[Model]] = {}  # by whether the base was evaluated, and its name
    for model in sorted(models, key=sort_key):
        root = [model, *above[model.name]][-1]
        is_base = root.name in bases
        grouped.setdefault((is_base, root.name if is_base else _origin(root)), []).append(model)
    result = []
    for (is_base, name), members in grouped.items():
        base = bases[name] if is_base else None
        members.sort(key=lambda m: (m.name != baseline, m is not base))
        result.append(Family(name if is_base else _short(name), base, members))
    return result


def baselines(members: Sequence[Model], above: Mapping[str, list[Model]]) -> list[tuple[Model, list[Model]]]:
    """Return what members of a family are compared with by default, and which: with every model that others
    were trained from, and with MLE on the same data from the same origin; without either with the first."""
    below = [(model, [m for m in members if model in above[m.name]]) for model in members]
    pairs = [(model, others) for model, others in below if others]
    stages: dict[tuple[Any, Any], list[Model]] = {}
    for model in (m for m in members if m.facts.get("objective")):
        start = model.facts.get("origin"), model.facts.get("data_fingerprint")
        stages.setdefault(start, []).append(model)
    for stage in stages.values():
        mle = max((m for m in stage if m.facts["objective"] == "mle"), key=_step, default=None)
        others = [m for m in stage if m.facts["objective"] != "mle"]
        if mle is not None and others:
            pairs.append((mle, others))
    return pairs or ([(members[0], list(members[1:]))] if len(members) > 1 else [])


def _step(model: Model) -> int:
    return int(model.facts.get("step") or 0)


def _origin(model: Model) -> str:
    """Return what a model was trained from; empty for nothing."""
    origin = str(model.facts.get("origin") or NEW)
    return "" if origin == NEW else origin


def _short(path: str) -> str:
    """Return models/llama-7b as llama-7b, and runs/a/export as a."""
    return next((name for name in reversed(Path(path).parts) if name not in WEIGHTS), path)


def _remarks(models: Sequence[Model], tasks: Sequence[str], runs: Mapping[str, Path]) -> list[str]:
    """Return the tasks on which models give one answer whatever the row, and runs that seem not to have made
    the models that they are shown for.

    Runs are moved and renamed: the path of the weights, the run's name and the run_dir that its configuration
    and the export recorded are compared.
    """
    remarks = []
    for result, model in ((m.results[t], m) for t in tasks for m in models if t in m.results):
        if (answer := only_answer(result)) is not None:
            remarks.append(f"{result['title']}: {model.name} answers {answer} only, whatever the row")
        if shortened := result["rows_shortened"]:
            remarks.append(
                f"{result['title']}: {shortened:,} of {result['n']:,} prompts of {model.name} lost "
                "demonstrations or text to the context"
            )
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


def _levels(estimate: dict[str, Any], name: str) -> tuple[float, float, float]:
    return estimate[name], estimate["interval"]["low"], estimate["interval"]["high"]


def _contamination(run: Path, faults: list[str]) -> dict[str, Container[str]]:
    """Return by task the test rows that share long passages with the training text, if that was checked.

    Rows are named by a digest of their text. faults: gets a line where a report cannot be read.
    """
    try:
        overlap = Path(read_written(run / CONFIG)["data"]["dir"]) / "train" / "contamination.json"
        tasks = read_json(overlap, STORED_BYTES)["tasks"].items()
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return {}
    try:
        return {task: dict(facts[SHARED]) for task, facts in tasks}
    except (LookupError, TypeError, ValueError):
        faults.append(f"{overlap} does not name rows by their text; delete it and run emo prepare again")
        return {}


def _row(model: Model, task: str, overlap: Container[str] | None) -> dict[str, Any]:
    """Return the numbers of a model on a task, also without test rows that are in its training text."""
    result, shared, untrained = model.results[task], None, None
    texts = model.texts(task) if overlap is not None else []
    if overlap is not None and any(texts):
        rows = zip(*model.outcomes(task), texts, strict=True)
        others = [(row, right) for row, right, text in rows if text not in overlap]
        groups = [group for (*_, group), _ in others] if result["groups"] else None
        shared = result["n"] - len(others)
        untrained = stats.accuracy([right for _, right in others], groups).value if others else None
    first = ("title", "accuracy", "chance", "majority", "n", "macro_f1", "score")
    counts = ("leaked", "rows_shortened", "rows_cut", "retriever", "shots", "conditions")
    return {
        **{"model": model.name, "task": task, "key": model.views[task]["key"], "prompt": result["version"]},
        **{name: result[name] for name in first},
        **{name: result["interval"][name] for name in ("low", "high")},
        **{name: facts["accuracy"] for name, facts in result["scores"].items()},
        **{name: result[name] for name in counts},
        **{"clean_accuracy": result["clean"]["accuracy"], "trained_on": shared},
        **{"untrained_accuracy": untrained},
        **{name: model.facts.get(name) for name in ("step", "tokens", "objective")},
    }
