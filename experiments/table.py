"""The table of an experiment: means with intervals, differences from the baseline, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import UserError
from common.files import finite, write_text
from common.provenance import code_version
from experiments.design import RESULTS, Experiment, Run
from experiments.report import sweep
from experiments.statistics import at_an_end, difference, estimate, holm, verdict
from experiments.work import Work

TABLE = "table.md"
END = "\u2020"  # beside a value at an end of the grid that it was chosen from


def gather(work: Work) -> dict[str, Any]:
    """Return all numbers of an experiment: `rows` by group of labels, and `verdicts`.

    Raises UserError when runs are missing: a table of a part would be another experiment.
    """
    experiment = work.experiment
    missing = [task.run.name for task in work.tasks() if not task.done]
    if missing:
        raise UserError(
            f"{len(missing)} runs are not done, for example {missing[0]}; run the experiment first"
        )
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    aside = [experiment.repeat, *([experiment.choose.axis] if experiment.choose else [])]
    for run in work.reported():
        groups.setdefault(run.without(*aside), []).append(run)
    values = {run.name: work.values(run) for runs in groups.values() for run in runs}
    rows = [_row(experiment, labels, runs, values) for labels, runs in groups.items()]
    _compare(experiment, rows)
    verdicts = {name: _answer(experiment, name, rows) for name in experiment.questions}
    lacking = _lacking(experiment, rows)
    for row in rows:
        del row["values"]
    return {"code": code_version(), "rows": rows, "verdicts": verdicts, "lacking": lacking}


def _row(
    experiment: Experiment,
    labels: tuple[tuple[str, str], ...],
    runs: list[Run],
    values: dict[str, dict[str, float]],
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for run in runs for name in values[run.name]))
    each = {name: [values[run.name].get(name, math.nan) for run in runs] for name in names}
    row: dict[str, Any] = {"labels": dict(labels), "runs": [run.name for run in runs], "values": each}
    if experiment.choose is not None:
        axis = experiment.choose.axis
        label = runs[0].label(axis) or "-"
        row["chosen"] = {axis: label}
        row["at_end"] = [axis] if _at_an_end(label, experiment.labels(axis)) else []
    row["measures"] = {name: estimate(values)._asdict() for name, values in each.items()}
    return row


def _at_an_end(label: str, labels: Iterable[str]) -> bool:
    """Return whether a label is the least or the largest of several numbers."""
    try:
        return at_an_end(float(label), [float(other) for other in labels])
    except ValueError:
        return False


def _baseline_of(experiment: Experiment, row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = row["labels"] | {experiment.compare.axis: experiment.compare.baseline}
    return next(other for other in rows if other["labels"] == wanted)


def _compare(experiment: Experiment, rows: list[dict[str, Any]]) -> None:
    """Add differences from the baseline; p-values corrected over all comparisons of a measure."""
    for name in dict.fromkeys(name for row in rows for name in row["measures"]):
        compared = []
        for row in rows:
            base = _baseline_of(experiment, row, rows)
            if base is not row and name in row["values"] and name in base["values"]:
                gap = difference(row["values"][name], base["values"][name])
                row.setdefault("differences", {})[name] = gap._asdict()
                compared.append(row["differences"][name])
        for gap, p in zip(compared, holm([gap["p"] for gap in compared]), strict=True):
            gap["p_holm"] = p


def _answer(experiment: Experiment, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict on a question; its units are repetitions, which share seed and data over all groups.

    The value of a repetition is its mean over the groups that differ in other labels than what is compared.
    """
    question, axis = experiment.questions[name], experiment.compare.axis

    def units(label: str) -> list[float]:
        """Return the outcome of each repetition."""
        groups = [_outcomes(row, question.outcome) for row in rows if row["labels"][axis] == label]
        return [fmean(values) for values in zip(*groups, strict=True)]

    answer = verdict(
        units(question.better), [units(label) for label in question.than], question.least, question.negligible
    )
    return {"question": question.text, "outcome": question.outcome, **answer._asdict()}


def _outcomes(row: dict[str, Any], name: str) -> list[float]:
    """Return a measure of a row's runs, in their order; NaN where one has no number."""
    return row["values"].get(name, [math.nan] * len(row["runs"]))


def _lacking(experiment: Experiment, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return, by each outcome that is asked for, the runs that have no number of it."""
    lacking: dict[str, list[str]] = {}
    for name in dict.fromkeys(question.outcome for question in experiment.questions.values()):
        for row in rows:
            found = zip(row["runs"], _outcomes(row, name), strict=True)
            lacking.setdefault(name, []).extend(run for run, value in found if not math.isfinite(value))
    return {name: runs for name, runs in lacking.items() if runs}


def write(work: Work) -> Path:
    """Write results.json and table.md into the experiment's directory; return the latter."""
    results = finite(gather(work))
    write_text(work.experiment.out / RESULTS, json.dumps(results, indent=1))
    write_text(work.experiment.out / TABLE, sweep(results).markdown())
    return work.experiment.out / TABLE
