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

`{out}` and the names can be used in every command, and in every text among the overrides; a label gives a
name another text with the key `names.NAME`.
"""

from __future__ import annotations

import itertools
import json
import shlex
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from emo.common.errors import UserError, nearest
from emo.common.recipe import Section, load_section, shown
from emo.common.untrusted import is_plain_name
from emo.data_prep.config import VALIDATION as UNNAMED

Overrides = dict[str, Any]
Sources = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Labels = tuple[tuple[str, str], ...]  # (axis, label) in the file's order
RESULTS = "results.json"  # what every sweep and study leaves in its `out`
VALIDATION, CHANGE = "validation_nll", "validation_change"  # what every run reports by itself
STAGES = PREPARE, TRAIN = "prepare", "train"  # of every run, before its measures
RESERVED = ("run", "dir", "export", "out", "baseline", "baseline_run")  # variables of a measure's command


def validation_metric(metric: str, dataset: str) -> str:
    """Return the name of VALIDATION or CHANGE on a validation set."""
    return metric if dataset == UNNAMED else f"{metric}:{dataset}"


def validation_set(metric: str) -> str | None:
    """Return the validation set of a metric, None where the experiment itself measures it."""
    prefix, _, dataset = metric.partition(":")
    return (dataset or UNNAMED) if prefix in (VALIDATION, CHANGE) else None


class Measure(Section):
    """A command that leaves JSON files, and the numbers to read from them.

    In both `{run}`, `{dir}`, `{export}` and `{out}` stand for the run's name, its run directory, its exported
    model, and the experiment's directory; labels stand for themselves by the name of their axis. A command
    may also name `{baseline}`, the exported model of the baseline with the same other labels, and
    `{baseline_run}`, that run's name; it is then done after the choice.
    """

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
    # Labels by axis: runs with others do without the axis that is chosen.
    where: dict[str, list[str | int | float]] = {}


class Compare(Section):
    """The axis whose labels are compared, and the label that they are compared with."""

    axis: str
    baseline: str


class Question(Section):
    """A question with a rule: does `better` beat every one of `than` in `outcome`?

    yes: each paired interval, widened for their number, lies beyond `negligible` on the better side; no: at
    least one of them lies wholly on the other side of it; otherwise undecided.
    """

    text: str
    better: str
    than: list[str] = Field(min_length=1)
    outcome: str
    least: bool = True
    negligible: float = Field(0.0, ge=0)


class Experiment(Section):
    """The whole file."""

    out: Path
    recipe: Path
    names: dict[str, str | int] = {}  # texts that commands and overrides refer to
    before: dict[str, str] = {}  # commands by name
    set: Overrides = {}
    axes: dict[str, dict[str | int | float, Any]] = Field(min_length=1)  # labels may be numbers
    repeat: str
    choose: Choose | None = None
    measures: dict[str, Measure] = {}
    compare: Compare
    questions: dict[str, Question] = {}
    ranks: int = Field(1, gt=0)  # of every training run
    minutes: float | None = Field(None, gt=0)  # of one run, for the estimate until one has been measured

    @model_validator(mode="after")
    def _check_axes(self) -> Experiment:
        """Refuse labels that change nothing, which would count one run as several, and roles of one axis."""
        for axis in self.axes:
            labels = self.labels(axis)
            if not labels:
                raise ValueError(f"axes.{axis} has no labels; give it some")
            if any(f"{{{axis}}}" in measure.command for measure in self.measures.values()):
                continue
            first: dict[str, str] = {}
            for label, overrides in labels.items():
                same = first.setdefault(json.dumps(overrides, sort_keys=True, default=str), label)
                if same != label:
                    raise ValueError(f"axes.{axis}: {same} and {label} are the same; leave one of them out")
        roles = [self.repeat, self.compare.axis, *([self.choose.axis] if self.choose else [])]
        for axis in roles:
            _require(axis, self.axes, "one of the axes")
        if len(set(roles)) < len(roles):
            raise ValueError("repeat, choose.axis and compare.axis must be different axes")
        return self

    @property
    def metrics(self) -> list[str]:
        """Return the names of all that is measured, apart from validation sets with a name."""
        return [VALIDATION, CHANGE, *(name for m in self.measures.values() for name in m.read)]

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        """Refuse names with two meanings, and those of files that would not stay in `out`."""
        for name in self.names:
            if name in RESERVED or name in self.axes:
                raise ValueError(f"names.{name}: {{{name}}} already means something else; rename it")
        twice = repeated([*self.measures, *STAGES]) + repeated(self.metrics)
        twice += [name for name in self.metrics[2:] if validation_set(name) is not None]
        if twice:
            raise ValueError(f"measures: {twice[0]} is measured twice; rename it")
        labels = [label for axis in self.axes for label in self.labels(axis)]
        for name in (*self.before, *self.measures, *labels):
            if not is_plain_name(name) or name[0] in ".-":
                raise ValueError(f"{shown(name)} cannot be part of a file's name; rename it")
        return self

    @model_validator(mode="after")
    def _check_references(self) -> Experiment:
        """Refuse labels and metrics that do not exist."""
        references = [(self.compare.axis, self.compare.baseline)]
        for question in self.questions.values():
            references += [(self.compare.axis, label) for label in (question.better, *question.than)]
        if self.choose is not None:
            others = self.axes.keys() - {self.choose.axis, self.repeat}
            for axis, choosing in self.choose.where.items():
                _require(axis, others, "another axis")
                references += [(axis, str(label)) for label in choosing]
        for axis, label in references:
            _require(label, self.labels(axis), f"a label of {axis}")
        for name in self.decisive:
            if validation_set(name) is None:
                _require(name, self.metrics, "measured")
        by = self.choose.by if self.choose else None
        for name, measure in self.measures.items():
            if measure.against_baseline and by in measure.read:
                raise ValueError(f"choose.by={by}: {name} needs the baseline, which is chosen first")
        return self

    @property
    def decisive(self) -> list[str]:
        """Return the metrics that choose and answer."""
        choice = [self.choose.by] if self.choose else []
        return [*(question.outcome for question in self.questions.values()), *choice]

    @property
    def variables(self) -> dict[str, Any]:
        """Return what `{name}` stands for everywhere. A name may use those before it."""
        variables: dict[str, Any] = {"out": self.out}
        for name, text in self.names.items():
            variables[name] = fill(str(text), variables, f"names.{name}")
        return variables

    def labels(self, axis: str) -> dict[str, Overrides]:
        """Return the labels of an axis in order, with the overrides that each stands for."""
        options = self.axes[axis]
        if len(options) == 1:
            ((key, values),) = options.items()
            if isinstance(values, list):
                if twice := repeated(map(str, values)):
                    raise ValueError(f"axes.{axis}: {key} is given {shown(twice[0])} more than once")
                return {str(value): {str(key): value} for value in values}
        for label, overrides in options.items():
            if not isinstance(overrides, Mapping):
                raise ValueError(f"axes.{axis}.{label} needs keys and values, or one key with a list")
        return {str(label): dict(overrides) for label, overrides in options.items()}


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once."""
    return [name for name, times in Counter(names).items() if times > 1]


def _require(name: str, options: Iterable[str], kind: str) -> None:
    """Raise ValueError for a name that is not among the options."""
    if name not in options:
        raise ValueError(f"{name} is not {kind}; {nearest(name, options)}")


class Run(NamedTuple):
    """One combination of labels."""

    labels: Labels
    overrides: Overrides
    names: Mapping[str, Any]  # that its labels give another text

    @property
    def name(self) -> str:
        """Return the name, also of its directory."""
        return "-".join(label for _, label in self.labels)

    def label(self, axis: str) -> str | None:
        """Return its label on an axis; None on one that is chosen only where it has other labels."""
        return dict(self.labels).get(axis)

    def without(self, *axes: str) -> Labels:
        """Return its labels on the other axes."""
        return tuple(pair for pair in self.labels if pair[0] not in axes)


def read_experiment(path: Path, overrides: list[str]) -> Experiment:
    """Return an experiment file with `key=value` overrides. Raises UserError naming what is wrong."""
    experiment = load_section(Experiment, path, overrides, "experiment")
    if names := repeated(run.name for run in expand(experiment)):
        raise UserError(f"{path}: two runs are both called {names[0]}; give their labels different names")
    return experiment


def expand(experiment: Experiment) -> list[Run]:
    """Return all combinations of labels, in the order of the axes."""
    axes = {axis: experiment.labels(axis) for axis in experiment.axes}
    choose, variables = experiment.choose, experiment.variables
    runs: dict[Labels, Run] = {}
    for combination in itertools.product(*axes.values()):
        labels = dict(zip(axes, combination, strict=True))
        if choose and any(labels[axis] not in map(str, choosing) for axis, choosing in choose.where.items()):
            del labels[choose.axis]
        if (key := tuple(labels.items())) in runs:
            continue
        overrides = dict(experiment.set)
        for axis, label in key:
            overrides |= axes[axis][label]
        names = {}
        for override in [override for override in overrides if override.startswith("names.")]:
            name = override.removeprefix("names.")
            if name not in experiment.names:
                raise UserError(f"{override}: no such name under names; {nearest(name, experiment.names)}")
            names[name] = _filled(overrides.pop(override), variables, override)
        filled = {name: _filled(value, variables | names, name) for name, value in overrides.items()}
        runs[key] = Run(key, filled, names)
    return list(runs.values())


def _filled(value: Any, variables: Mapping[str, Any], key: str) -> Any:
    """Return an override with every text in it filled in."""
    if isinstance(value, Mapping):
        return {name: _filled(inner, variables, key) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables, key) for inner in value]
    return fill(value, variables, f"override {key}") if isinstance(value, str) else value


def fill(text: str, variables: Mapping[str, Any], key: str) -> str:
    """Return `text` with its `{name}`s filled in. Raises UserError for a name that is no variable."""
    try:
        # Nothing but names: formats and attributes would reach into the objects themselves.
        for _, name, spec, conversion in string.Formatter().parse(text):
            if name is not None and (name not in variables or spec or conversion):
                raise KeyError(name)
        return text.format_map(variables)
    except (KeyError, ValueError) as error:
        names = ", ".join(variables)
        raise UserError(f"{key}: {text!r} cannot be filled in ({error}); known: {names}") from None


def split_command(text: str, variables: Mapping[str, Any], key: str) -> list[str]:
    """Return the words of a command; a variable stays one word, whatever is in it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{key}: {text!r} is not a command ({error})") from None
    if not words:
        raise UserError(f"{key} is empty; give it a command")
    return [fill(word, variables, key) for word in words]


def executable(command: list[str]) -> list[str]:
    """Return a command whose program is this Python, or the one that is installed beside it."""
    beside = Path(sys.executable).parent / command[0]
    program = sys.executable if command[0] == "python" else str(beside) if beside.exists() else command[0]
    return [program, *command[1:]]


def trials(experiment: Experiment, runs: list[Run]) -> list[Run]:
    """Return the runs among which `choose` decides: all labels of its axis, the first of `repeat`."""
    if experiment.choose is None:
        return []
    axis, first = experiment.choose.axis, next(iter(experiment.labels(experiment.repeat)))
    return [run for run in runs if run.label(experiment.repeat) == first and run.label(axis) is not None]


def chosen(experiment: Experiment, runs: list[Run], scores: Mapping[str, float]) -> list[Run]:
    """Return the runs that are reported, from the scores of all trials by run name."""
    if experiment.choose is None:
        return runs
    axis, repeat, sign = experiment.choose.axis, experiment.repeat, 1 if experiment.choose.least else -1
    best: dict[Labels, Run] = {}
    for run in trials(experiment, runs):
        group = run.without(axis, repeat)
        if group not in best or sign * scores[run.name] < sign * scores[best[group].name]:
            best[group] = run
    labels = {group: run.label(axis) for group, run in best.items()}
    return [run for run in runs if labels.get(run.without(axis, repeat)) == run.label(axis)]
