"""The numbers of an experiment: means with intervals, differences from the baseline, verdicts."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from emo.common.errors import UserError
from emo.common.provenance import code_version
from emo.eval.stats import holm
from emo.experiments.design import Experiment, Labels, Run
from emo.experiments.statistics import at_an_end, difference, estimate, verdict
from emo.experiments.sweep import Sweep


def gather(sweep: Sweep) -> dict[str, Any]:
    """Return all numbers of an experiment: `rows` by group of labels, and `verdicts`.

    Raises UserError when runs are missing: a table of a part would be another experiment.
    """
    experiment, choose = sweep.experiment, sweep.experiment.choose
    missing = [task.run.name for task in sweep.tasks() if not task.done]
    if missing:
        problem = f"{len(missing)} runs are not done, for example {missing[0]}; run the experiment first"
        raise UserError(problem, code="not-done")
    aside = (experiment.repeat, choose.axis) if choose else (experiment.repeat,)
    groups: dict[Labels, list[Run]] = {}
    for run in sweep.reported():
        groups.setdefault(run.without(*aside), []).append(run)
    rows = []
    for labels, runs in groups.items():
        measured = [sweep.values(run) for run in runs]
        metrics = dict.fromkeys(metric for values in measured for metric in values)
        columns = {metric: [values.get(metric, math.nan) for values in measured] for metric in metrics}
        row: dict[str, Any] = {"labels": dict(labels), "runs": [run.name for run in runs], "values": columns}
        if choose is not None:
            label = runs[0].label(choose.axis) or "-"
            row["chosen"] = {choose.axis: label}
            row["at_end"] = [choose.axis] if at_an_end(label, experiment.axes[choose.axis]) else []
        row["measures"] = {metric: estimate(values) for metric, values in columns.items()}
        rows.append(row)
    by_labels = {tuple(row["labels"].items()): row for row in rows}
    for metric in dict.fromkeys(metric for row in rows for metric in row["measures"]):
        gaps = []  # from the baseline; p-values are corrected over all comparisons of a metric
        for row in rows:
            labels = row["labels"] | {experiment.compare.axis: experiment.compare.baseline}
            base = by_labels[tuple(labels.items())]
            if base is not row and metric in row["values"] and metric in base["values"]:
                gap = difference(row["values"][metric], base["values"][metric])
                row.setdefault("differences", {})[metric] = gap
                gaps.append(gap)
        for gap, p in zip(gaps, holm([gap["p"] for gap in gaps]), strict=True):
            gap["p_holm"] = p
    verdicts = {name: answer(experiment, name, rows) for name in experiment.questions}
    lacking = {}
    for metric in dict.fromkeys(question.outcome for question in experiment.questions.values()):
        pairs = [pair for row in rows for pair in zip(row["runs"], _outcomes(row, metric), strict=True)]
        if runs_without := [run for run, value in pairs if not math.isfinite(value)]:
            lacking[metric] = runs_without
    for row in rows:
        del row["values"]
    return {"code": code_version(), "rows": rows, "verdicts": verdicts, "lacking": lacking}


def answer(experiment: Experiment, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict on a question; its units are repetitions, which share seed and data over all groups.

    The value of a repetition is its mean over the groups that differ in other labels than what is compared.
    """
    question, axis = experiment.questions[name], experiment.compare.axis
    units: dict[str, list[float]] = {}
    for label in (question.better, *question.than):
        groups = [_outcomes(row, question.outcome) for row in rows if row["labels"][axis] == label]
        units[label] = [fmean(values) for values in zip(*groups, strict=True)]
    others = [units[label] for label in question.than]
    result = verdict(units[question.better], others, question.least)
    return {"question": question.text, "outcome": question.outcome, **result}


def _outcomes(row: dict[str, Any], metric: str) -> list[float]:
    """Return a metric of a row's runs, in their order; NaN where one has no number."""
    return row["values"].get(metric, [math.nan] * len(row["runs"]))
