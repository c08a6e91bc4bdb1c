"""An experiment file: a base recipe, axes, and what to measure, expanded into runs.

    out: runs/experiments/NAME
    recipe: launch/recipes/BASE.yaml
    names: { data: DIR, oracle: "{data}/oracle" } # {oracle} in commands; or give names.oracle=PATH
    before:                                      # done once, in this order, before any run
      corpus: emo generate --model {oracle} --name oracle --output_path {out}/corpus
    set: { train.max_steps: 200 }                    # overrides of every run
    axes:
      objective:                                 # labels, each with its overrides
        mle: { objective.name: mle }
        emo: { objective.name: emo }
      lr: { train.learning_rate: [1.0e-4, 3.0e-4] }  # the short form: one key, its values are the labels
      seed: { train.seed: [1, 2, 3] }
    repeat: seed                                 # the axis over which results are paired and averaged
    choose: { axis: lr, by: validation_nll }     # on development data, with the first of `repeat` alone;
                                                 # where: { objective: [emo] }: only those have the axis
    measures:
      sst2:
        command: emo eval --model {export} --name {run} --output_path {out}/results --tasks sst2 --data DIR
        read: { accuracy: "{out}/results/models/{run}/sst2.json:result.accuracy" }
    compare: { axis: objective, baseline: mle }

Every run is the base recipe with the overrides of its labels. Where an axis is chosen, each combination of
the other axes is first tried with all its labels and the first label of `repeat`; only the best one is then
run with the other labels of `repeat`. A trial ends with the measure that it is chosen by, so that later ones,
those on test data, are made of what was chosen alone.

Besides what is measured every run reports, in nats per token, `validation_nll` and `validation_change`, how
that changed since step 0; of a validation set with a name `validation_nll:NAME` and `validation_change:NAME`.

Of what a file `extends`, a command, label, measure or question that it calls null is left out.

`{out}` and the names can be used in every command, and in every text among the overrides; a label gives a
name another text with the key `names.NAME`. A measure may also use its run's `{run}` (name), `{dir}`,
`{export}` and labels, `{AXIS}`; one that uses `{baseline}` or `{baseline_run}`, export and name of the
baseline with the same other labels, is done after the choice.
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

from emo.common.config.recipe import Section, format_value, load_section
from emo.common.errors import UserError, nearest
from emo.common.io.untrusted import is_plain_name
from emo.data_prep.config import VALIDATION as UNNAMED

Overrides = dict[str, Any]
Labels = tuple[tuple[str, str], ...]  # (axis, label) in the file's order
RESULTS = "results.json"  # what every sweep and study leaves in its `out`
VALIDATION, CHANGE = "validation_nll", "validation_change"  # what every run reports by itself
STAGES = PREPARE, TRAIN = "prepare", "train"  # of every run, before its measures
VARIABLE = re.compile(r"\{([\w.-]+)\}")
RESERVED = ("run", "dir", "export", "out", "baseline", "baseline_run")  # variables of a measure's command


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once."""
    return [name for name, times in Counter(names).items() if times > 1]


def _spelt_out(axis: Any) -> Any:
    """Return the short form of an axis, one key with a list of values, as labels with their overrides."""
    if not isinstance(axis, dict):
        return axis
    ((key, values),) = axis.items() if len(axis) == 1 else ((None, None),)
    if isinstance(values, list):
        axis = {value: {key: value} for value in values}
    return {str(label): overrides for label, overrides in axis.items()}


Label = Annotated[str, BeforeValidator(str)]  # or a number
Axis = Annotated[dict[str, Overrides], BeforeValidator(_spelt_out), Field(min_length=1)]
Sources = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Measure(Section):
    """A command that leaves JSON files, and the numbers to read from them."""

    command: str
    # Metric: "FILE:key.key", or several of them whose mean it is. Empty where only the next measure needs it.
    read: dict[str, Sources] = {}

    @property
    def against_baseline(self) -> bool:
        """Return whether the result of the baseline is needed, too."""
        return "{baseline}" in self.command or "{baseline_run}" in self.command


class Choose(Section):
    """One axis is settled on development data instead of being reported."""

    axis: str
    by: str = VALIDATION
    least: bool = True  # the smallest wins; false: the largest
    where: dict[str, list[Label]] = {}  # labels by axis: runs with others do without the axis that is chosen


class Compare(Section):
    """The axis whose labels are compared, and the label that they are compared with."""

    axis: str
    baseline: Label


class Question(Section):
    """A question with a rule: does `better` beat every one of `than` in `outcome`?

    yes: each paired interval, widened for their number, lies on the better side of zero; no: at least one of
    them lies wholly on the other side of it; otherwise undecided.
    """

    text: str
    better: Label
    than: list[Label] = Field(min_length=1)
    outcome: str
    least: bool = True


class Front(Section):
    """The loss at equal gain of the runs of a label: over all axes but `compare.axis` and `repeat`.

    Metrics of which less is better.
    """

    text: str
    gained: str
    lost: str


class Experiment(Section):
    """The whole file."""

    out: Path
    recipe: Path
    names: dict[str, str | int] = {}  # texts that commands and overrides refer to
    before: dict[str, str] = {}  # commands by name
    set: Overrides = {}
    axes: dict[str, Axis] = Field(min_length=1)
    repeat: str
    choose: Choose | None = None
    measures: dict[str, Measure] = {}
    compare: Compare
    questions: dict[str, Question] = {}
    fronts: dict[str, Front] = {}
    ranks: int = Field(1, gt=0)  # of every training run
    minutes: float | None = Field(None, gt=0)  # of one run, for the estimate until one has been measured

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, tree: Any) -> Any:
        """Return the file without the commands, labels, measures and questions that it calls null."""
        if not isinstance(tree, dict):
            return tree
        result = copy.deepcopy(tree)
        groups: list[Any] = [result.get(name) for name in ("before", "measures", "questions")]
        groups += (result.get("axes") or {}).values()
        for group in groups:
            for name in [n for n, value in group.items() if value is None] if isinstance(group, dict) else ():
                del group[name]
        return result

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        """Refuse what does not exist, names with two meanings, and labels that would count a run twice."""
        choose, axis = self.choose, self.compare.axis
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
        if repeated(roles) or (choose and {choose.axis, self.repeat} & choose.where.keys()):
            raise ValueError("repeat, choose.axis, choose.where and compare.axis must be different axes")
        for name in self.names:
            if name in RESERVED or name in self.axes:
                raise ValueError(f"names.{name}: {{{name}}} already means something else; rename it")
        for axis, options in self.axes.items():
            if any(f"{{{axis}}}" in measure.command for measure in self.measures.values()):
                continue
            if twice := repeated(json.dumps(o, sort_keys=True, default=str) for o in options.values()):
                raise ValueError(f"axes.{axis}: two labels are {twice[0]}; leave one of them out")
        metrics = [VALIDATION, CHANGE, *(name for m in self.measures.values() for name in m.read)]
        if twice := repeated([*self.measures, *STAGES]) + repeated(metrics):
            raise ValueError(f"measures: {twice[0]} is measured twice; rename it")
        for name in (*self.before, *self.measures, *(label for axis in self.axes.values() for label in axis)):
            if not is_plain_name(name) or name[0] in ".-":
                raise ValueError(f"{format_value(name)} cannot be part of a file's name; rename it")
        for name, measure in self.measures.items():
            if measure.against_baseline and choose and choose.by in measure.read:
                raise ValueError(f"choose.by={choose.by}: {name} needs the baseline, which is chosen first")
        return self

    @property
    def decisive(self) -> list[str]:
        """Return the metrics that questions and fronts are about."""
        metrics = [question.outcome for question in self.questions.values()]
        metrics += [metric for front in self.fronts.values() for metric in (front.gained, front.lost)]
        return list(dict.fromkeys(metrics))

    @property
    def variables(self) -> dict[str, Any]:
        """Return what `{name}` stands for everywhere. A name may use those before it."""
        variables: dict[str, Any] = {"out": self.out}
        for name, text in self.names.items():
            variables[name] = fill(text, variables, f"names.{name}")
        return variables


def validation_metrics(dataset: str) -> list[str]:
    """Return what every run reports of a validation set, VALIDATION and CHANGE, by the names in a table."""
    return [f"{metric}:{dataset}".removesuffix(f":{UNNAMED}") for metric in (VALIDATION, CHANGE)]


class Run(NamedTuple):
    """One combination of labels."""

    labels: dict[str, str]  # by axis; not on one that is chosen only where it has other labels
    overrides: Overrides
    variables: dict[str, Any]  # of commands: the experiment's, as its labels have them, and the labels

    @property
    def name(self) -> str:
        """Return the name, also of its directory."""
        return "-".join(self.labels.values())

    def without(self, *axes: str) -> Labels:
        """Return its labels on the other axes."""
        return tuple(pair for pair in self.labels.items() if pair[0] not in axes)

    def arguments(self, section: str = "") -> list[str]:
        """Return its overrides, all or those of a section, as on a command line."""
        return [
            f"{key}={json.dumps(value) if isinstance(value, dict | list | bool | None) else value}"
            for key, value in self.overrides.items()
            if section in ("", key.partition(".")[0])
        ]


def read_experiment(path: Path, overrides: list[str]) -> Experiment:
    """Return an experiment file with `key=value` overrides. Raises UserError naming what is wrong."""
    experiment = load_section(Experiment, path, overrides, "experiment")
    if names := repeated(run.name for run in expand(experiment)):
        raise UserError(f"{path}: two runs are both called {names[0]}; give their labels different names")
    return experiment


def expand(experiment: Experiment) -> list[Run]:
    """Return all combinations of labels, in the order of the axes."""
    axes, choose = experiment.axes, experiment.choose
    runs: dict[Labels, Run] = {}
    for combination in itertools.product(*axes.values()):
        labels = dict(zip(axes, combination, strict=True))
        if choose and any(labels[axis] not in choosing for axis, choosing in choose.where.items()):
            del labels[choose.axis]
        overrides, variables = dict(experiment.set), labels | experiment.variables
        for axis, label in labels.items():
            overrides |= axes[axis][label]
        for key in [key for key in overrides if key.startswith("names.")]:
            name = key.removeprefix("names.")
            if name not in experiment.names:
                raise UserError(f"{key}: no such name under names; {nearest(name, experiment.names)}")
            variables[name] = fill(overrides.pop(key), variables, key)
        pairs = tuple(labels.items())
        runs[pairs] = Run(labels, fill(overrides, variables, f"overrides of {labels}"), variables)
    return list(runs.values())


def fill(value: Any, variables: Mapping[str, Any], key: str) -> Any:
    """Return a text with its `{name}`s filled in, or a tree with every text in it.

    Raises UserError, naming `key`, for a name that is no variable.
    """
    if isinstance(value, Mapping):
        return {name: fill(inner, variables, key) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, variables, key) for inner in value]
    if not isinstance(value, str):
        return value

    def text(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UserError(f"{key}: {format_value(value)} names {match[0]}; {nearest(match[1], variables)}")
        return str(variables[match[1]])

    return VARIABLE.sub(text, value)


def split_command(text: str, variables: Mapping[str, Any], key: str) -> list[str]:
    """Return the words of a command; a variable stays one word, whatever is in it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{key}: {text!r} is not a command ({error})") from None
    if not words:
        raise UserError(f"{key} is empty; give it a command")
    return [fill(word, variables, key) for word in words]


def trials(experiment: Experiment, runs: list[Run]) -> list[Run]:
    """Return the runs among which `choose` decides: all labels of its axis, the first of `repeat`."""
    if experiment.choose is None:
        return []
    axis, first = experiment.choose.axis, next(iter(experiment.axes[experiment.repeat]))
    return [run for run in runs if run.labels[experiment.repeat] == first and axis in run.labels]


def chosen(experiment: Experiment, runs: list[Run], scores: Mapping[str, float]) -> list[Run]:
    """Return the runs that are reported, from the scores of all trials by run name; NaN is the worst."""
    if experiment.choose is None:
        return runs
    axis, repeat, sign = experiment.choose.axis, experiment.repeat, 1 if experiment.choose.least else -1
    best: dict[Labels, tuple[float, str]] = {}
    for run in trials(experiment, runs):
        score, group = sign * scores[run.name], run.without(axis, repeat)
        score = score if math.isfinite(score) else math.inf
        if group not in best or score < best[group][0]:
            best[group] = score, run.labels[axis]
    labels = {group: label for group, (_, label) in best.items()}
    return [run for run in runs if labels.get(run.without(axis, repeat)) == run.labels.get(axis)]
