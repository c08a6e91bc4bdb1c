"""The table of an experiment: means with intervals, differences from the baseline, verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import finite, write_text
from common.provenance import code_version
from experiments.design import RESULTS, Experiment, Run
from experiments.report import sweep
from experiments.statistics import difference, estimate, holm, verdict
from experiments.work import Work

TABLE = "table.md"


def gather(work: Work) -> dict[str, Any]:
    """All numbers of an experiment: `rows` by group of labels, and `verdicts`.

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
        row["chosen"] = {experiment.choose.axis: runs[0].label(experiment.choose.axis) or "-"}
    row["measures"] = {name: estimate(found)._asdict() for name, found in each.items()}
    return row


def _baseline_of(experiment: Experiment, row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = row["labels"] | {experiment.compare.axis: experiment.compare.baseline}
    return next(other for other in rows if other["labels"] == wanted)


def _compare(experiment: Experiment, rows: list[dict[str, Any]]) -> None:
    """Differences from the baseline; p-values corrected over all comparisons of a measure."""
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
    """The verdict on a question, over all groups that differ only in what is compared."""
    question, axis = experiment.questions[name], experiment.compare.axis
    better: list[float] = []
    others: list[list[float]] = [[] for _ in question.than]
    for row in rows:
        if row["labels"][axis] != question.better:
            continue
        better += _outcomes(row, question.outcome)
        for place, label in enumerate(question.than):
            wanted = row["labels"] | {axis: label}
            other = next(r for r in rows if r["labels"] == wanted)
            others[place] += _outcomes(other, question.outcome)
    found = verdict(better, others, question.least, question.negligible)
    return {"question": question.text, "outcome": question.outcome, **found._asdict()}


def _outcomes(row: dict[str, Any], name: str) -> list[float]:
    """What a row's runs have of a measure, in their order; NaN where one has no number."""
    return row["values"].get(name, [math.nan] * len(row["runs"]))


def _lacking(experiment: Experiment, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By each outcome that is asked for the runs that have no number of it."""
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
