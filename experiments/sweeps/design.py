"""Experiment files: a base recipe, axes and measures, expanded into runs.

    out: runs/experiments/NAME
    recipe: launch/recipes/BASE.yaml
    names: { data: DIR, oracle: "{data}/oracle" } # {oracle} in commands; override: names.oracle=PATH
    before:                                      # commands that run once, in this order, before all runs
      corpus: emo generate --model {oracle} --name oracle --output_path {out}/corpus
    set: { train.max_steps: 200 }                    # overrides of every run
    axes:
      objective:                                 # labels, each with its overrides
        mle: { objective.name: mle }
        emo: { objective.name: emo }
      lr: { train.learning_rate: [1.0e-4, 3.0e-4] }  # short form: one key, with its values as labels
      seed: { train.seed: [1, 2, 3] }
    repeat: seed                                 # axis over which results are paired and averaged
    choose: { axis: lr, by: validation_nll }     # on development data, with the first label of `repeat`;
                                                 # where: { objective: [emo] } limits the axis to these labels
    measures:
      sst2:
        command: emo eval --model {export} --name {run} --output_path {out}/results --tasks sst2 --data DIR
        read: { accuracy: "{out}/results/models/{run}/sst2.json:result.accuracy" }
    compare: { axis: objective, baseline: mle }

Each run is the base recipe with the overrides of its labels. If an axis is chosen, all its labels are first
tried with the first label of `repeat`, for each combination of the other axes. Only the best one then runs
with the other labels of `repeat`. A trial ends with the measure that decides the choice, so that later
measures, on test data, are made for chosen runs only.

Each run also reports `validation_nll`, `validation_change` (since step 0) and `validation_kl_from_base` (with
train.kl_from_base), in nats per token. For a named validation set the metrics end in `:NAME`.

In a file with `extends`, a command, label, measure or question set to null is removed.

Commands and overrides may use `{out}` and the names. A label can override a name by the key `names.NAME`. A
measure may also use its run's `{run}` (name), `{dir}`, `{export}` and labels, `{AXIS}`. A measure that uses
`{baseline}` or `{baseline_run}` (export and name of the baseline with the same other labels) runs after the
choice.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from emo.common.config.recipe import Section, apply_override, format_value, parse_section, read_recipe
from emo.common.errors import UserError, nearest
from emo.common.io.untrusted import is_plain_name
from emo.data_prep.config import VALIDATION as UNNAMED

Overrides = dict[str, Any]
Labels = tuple[tuple[str, str], ...]  # (axis, label) in the file's order
RESULTS = "results.json"  # results of a sweep or study in its `out`
# Metrics of every run.
VALIDATION = "validation_nll"
CHANGE = "validation_change"
KL = "validation_kl_from_base"
OF_RUNS = (VALIDATION, CHANGE, KL)  # keys of a run's validation records
STAGES = PREPARE, TRAIN = "prepare", "train"  # of every run, before its measures
VARIABLE = re.compile(r"\{([\w.-]+)\}")
SET = "set."  # beginning of overrides of an experiment that change the recipe of all runs
RESERVED = ("run", "dir", "export", "out", "baseline", "baseline_run")  # variables of measures


def find_duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, times in Counter(names).items() if times > 1]


def _expand_axis(axis: Any) -> Any:
    """Expand the short form of an axis, one key with a list of values, to labels with overrides."""
    if not isinstance(axis, dict):
        return axis
    ((key, values),) = axis.items() if len(axis) == 1 else ((None, None),)
    if isinstance(values, list):
        if any(isinstance(value, dict | list) for value in values):
            raise ValueError(f"values of {key} need labels, as in {{label: {{{key}: value}}}}")
        axis = {value: {key: value} for value in values}
    return {str(label): overrides for label, overrides in axis.items()}


Label = Annotated[str, BeforeValidator(str)]  # or a number
Axis = Annotated[dict[str, Overrides], BeforeValidator(_expand_axis), Field(min_length=1)]
Sources = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Measure(Section):
    """A command that writes JSON files, and the numbers to read from them."""

    command: str
    # Metric: "FILE:key.key", or a list of them to average. Empty if only the next measure needs the files.
    read: dict[str, Sources] = {}

    @property
    def against_baseline(self) -> bool:
        """Return whether the command needs the baseline's results."""
        return "{baseline}" in self.command or "{baseline_run}" in self.command


class Choose(Section):
    """An axis that is chosen on development data instead of being reported."""

    axis: str
    by: str = VALIDATION
    least: bool = True  # whether the smallest value is best
    where: dict[str, list[Label]] = {}  # labels by axis; other runs do not have the chosen axis


class Compare(Section):
    """The axis whose labels are compared with a baseline label."""

    axis: str
    baseline: Label


class SweepQuestion(Section):
    """A question with a decision rule: does `better` beat all of `than` in `outcome`?

    yes: all paired intervals (simultaneous) lie on the better side of zero. no: at least one lies on the
    other side. Otherwise undecided.
    """

    text: str
    better: Label
    than: list[Label] = Field(min_length=1)
    outcome: str
    least: bool = True


class Front(Section):
    """Loss at equal gain, over the runs of a label on all axes except `compare.axis` and `repeat`.

    Lower is better in both metrics.
    """

    text: str
    gained: str
    lost: str


class Prediction(Section):
    """A rank correlation of two metrics over all reported runs."""

    text: str
    by: str
    of: str


class Experiment(Section):
    """An experiment file."""

    out: Path
    recipe: Path
    names: dict[str, str | int] = {}  # variables of commands and overrides
    before: dict[str, str] = {}  # commands by name
    set: Overrides = {}
    axes: dict[str, Axis] = Field(min_length=1)
    repeat: str
    choose: Choose | None = None
    measures: dict[str, Measure] = {}
    compare: Compare
    questions: dict[str, SweepQuestion] = {}
    fronts: dict[str, Front] = {}
    predictions: dict[str, Prediction] = {}
    ranks: int = Field(1, gt=0)  # of each training run
    minutes: float | None = Field(None, gt=0)  # expected time of a run, until one has been measured

    @model_validator(mode="before")
    @classmethod
    def _remove_nulls(cls, tree: Any) -> Any:
        """Remove commands, labels, measures and questions that are null."""
        if not isinstance(tree, dict):
            return tree
        result = copy.deepcopy(tree)
        groups: list[Any] = [result.get(name) for name in ("before", "measures", "questions")]
        if isinstance(axes := result.get("axes"), dict):
            groups += axes.values()
        for group in groups:
            for name in [n for n, value in group.items() if value is None] if isinstance(group, dict) else ():
                del group[name]
        return result

    @model_validator(mode="after")
    def _check_references(self) -> Experiment:
        choose = self.choose
        axis = self.compare.axis
        roles = [self.repeat, axis, *([choose.axis] if choose else [])]
        references = [("axes", role) for role in roles] + [(axis, self.compare.baseline)]
        for question in self.questions.values():
            references += [(axis, label) for label in (question.better, *question.than)]
        for other, labels in choose.where.items() if choose else ():
            references += [("axes", other), *((other, label) for label in labels)]
        for group, name in references:
            choices: Iterable[str] = self.axes if group == "axes" else self.axes[group]
            if name not in choices:
                raise ValueError(f"{name} is not one of {group}; {nearest(name, choices)}")
        if find_duplicates(roles) or (choose and {choose.axis, self.repeat} & choose.where.keys()):
            raise ValueError("repeat, choose.axis, choose.where and compare.axis must be different axes")
        for name, measure in self.measures.items():
            if measure.against_baseline and choose and choose.by in measure.read:
                raise ValueError(f"choose.by={choose.by}: {name} needs the baseline, which is chosen first")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        for name in self.names:
            if name in RESERVED or name in self.axes:
                raise ValueError(f"names.{name}: {{{name}}} already has another meaning; rename it")
        for axis, options in self.axes.items():
            if any(f"{{{axis}}}" in measure.command for measure in self.measures.values()):
                continue
            texts = (json.dumps(overrides, sort_keys=True, default=str) for overrides in options.values())
            if twice := find_duplicates(texts):
                raise ValueError(f"axes.{axis}: two labels have the overrides {twice[0]}; remove one of them")
        metrics = [*OF_RUNS, *(name for m in self.measures.values() for name in m.read)]
        if twice := find_duplicates([*self.measures, *STAGES]) + find_duplicates(metrics):
            raise ValueError(f"measures: {twice[0]} is measured twice; rename it")
        for name in (*self.before, *self.measures, *(label for axis in self.axes.values() for label in axis)):
            if not is_plain_name(name) or name[0] in ".-":
                raise ValueError(f"{format_value(name)} cannot be part of a file name; rename it")
        return self

    @property
    def decisive(self) -> list[str]:
        """Return the metrics of questions, fronts, predictions and `choose`."""
        metrics = [] if self.choose is None else [self.choose.by]
        metrics += [question.outcome for question in self.questions.values()]
        metrics += [metric for front in self.fronts.values() for metric in (front.gained, front.lost)]
        metrics += [metric for one in self.predictions.values() for metric in (one.by, one.of)]
        return list(dict.fromkeys(metrics))

    @property
    def variables(self) -> dict[str, object]:
        """Return the variables of all commands. A name may use the names before it."""
        variables: dict[str, object] = {"out": self.out}
        for name, text in self.names.items():
            variables[name] = fill_variables(text, variables, f"names.{name}")
        return variables


def validation_metrics(dataset: str) -> list[str]:
    """Return the names of OF_RUNS for a validation set."""
    return [f"{metric}:{dataset}".removesuffix(f":{UNNAMED}") for metric in OF_RUNS]


class RunSpec(NamedTuple):
    """One combination of labels."""

    labels: dict[str, str]  # by axis; without the chosen axis if `choose.where` excludes the run
    overrides: Overrides
    variables: dict[str, object]  # of commands, including the labels

    @property
    def name(self) -> str:
        """Return the name of the run and its directory."""
        return "-".join(self.labels.values())

    def without(self, *axes: str) -> Labels:
        """Return the labels on the other axes."""
        return tuple(pair for pair in self.labels.items() if pair[0] not in axes)

    def arguments(self, section: str = "") -> list[str]:
        """Return the overrides, of one section or all, as command-line arguments."""
        return [
            f"{key}={json.dumps(value) if isinstance(value, dict | list | bool | None) else value}"
            for key, value in self.overrides.items()
            if section in ("", key.partition(".")[0])
        ]


def read_experiment(path: Path, overrides: list[str]) -> Experiment:
    """Read an experiment file with `key=value` overrides. Raises UserError if it is invalid.

    In `set.KEY=value`, KEY is a key of the recipe, and may have dots.
    """
    tree = read_recipe(path, [text for text in overrides if not text.startswith(SET)], "experiment")
    for text in (text for text in overrides if text.startswith(SET)):
        key, _, _ = text.removeprefix(SET).partition("=")
        value: Any = {}
        apply_override(value, text)
        for part in (SET + key).split("."):
            value = value[part]
        tree["set"] = {**(tree.get("set") or {}), key: value}
    experiment = parse_section(Experiment, tree, "")
    if names := find_duplicates(run.name for run in expand(experiment)):
        raise UserError(
            f"{path}: two runs are named {names[0]}; give their labels different names", code="same-name"
        )
    return experiment


def expand(experiment: Experiment) -> list[RunSpec]:
    """Return all combinations of labels, in the order of the axes."""
    axes = experiment.axes
    choose = experiment.choose
    runs: dict[Labels, RunSpec] = {}
    for combination in itertools.product(*axes.values()):
        labels = dict(zip(axes, combination, strict=True))
        if choose and any(labels[axis] not in choosing for axis, choosing in choose.where.items()):
            del labels[choose.axis]
        overrides = dict(experiment.set)
        variables = labels | experiment.variables
        for axis, label in labels.items():
            overrides |= axes[axis][label]
        for key in [key for key in overrides if key.startswith("names.")]:
            name = key.removeprefix("names.")
            if name not in experiment.names:
                raise UserError(
                    f"{key}: no such name under names; {nearest(name, experiment.names)}", code="unknown-name"
                )
            variables[name] = fill_variables(overrides.pop(key), variables, key)
        pairs = tuple(labels.items())
        runs[pairs] = RunSpec(
            labels, fill_variables(overrides, variables, f"overrides of {labels}"), variables
        )
    return list(runs.values())


def fill_variables(value: Any, variables: Mapping[str, object], key: str) -> Any:
    """Fill in `{name}` in a text, or in all texts of a tree. Raises UserError for an unknown name."""
    if isinstance(value, Mapping):
        return {name: fill_variables(inner, variables, key) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill_variables(inner, variables, key) for inner in value]
    if not isinstance(value, str):
        return value

    def text(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UserError(
                f"{key}: {format_value(value)} uses the unknown {match[0]}; {nearest(match[1], variables)}",
                code="unknown-name",
            )
        return str(variables[match[1]])

    return VARIABLE.sub(text, value)


def split_command(text: str, variables: Mapping[str, object], key: str) -> list[str]:
    """Split a command into words. A variable always stays one word."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{key}: {text!r} is not a command ({error})", code="command") from None
    if not words:
        raise UserError(f"{key} is empty. Set a command, or remove it", code="command")
    return [fill_variables(word, variables, key) for word in words]


def find_trials(experiment: Experiment, runs: list[RunSpec]) -> list[RunSpec]:
    """Return the trials of `choose`: all labels of its axis, and the first label of `repeat`."""
    if experiment.choose is None:
        return []
    axis = experiment.choose.axis
    first = next(iter(experiment.axes[experiment.repeat]))
    return [run for run in runs if run.labels[experiment.repeat] == first and axis in run.labels]


def choose_runs(experiment: Experiment, runs: list[RunSpec], scores: Mapping[str, float]) -> list[RunSpec]:
    """Return the reported runs, from the scores of all trials by run name. NaN is the worst score."""
    if experiment.choose is None:
        return runs
    axis = experiment.choose.axis
    repeat = experiment.repeat
    sign = 1 if experiment.choose.least else -1
    best: dict[Labels, tuple[float, str]] = {}
    for run in find_trials(experiment, runs):
        score = sign * scores[run.name]
        group = run.without(axis, repeat)
        score = score if math.isfinite(score) else math.inf
        if group not in best or score < best[group][0]:
            best[group] = score, run.labels[axis]
    labels = {group: label for group, (_, label) in best.items()}
    return [run for run in runs if labels.get(run.without(axis, repeat)) == run.labels.get(axis)]
