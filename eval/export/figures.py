"""What an exported result says: accuracies with standard errors, counted again from the rows of the store.

    stderr = sqrt(sum_i (x_i - mean)^2 / (n - 1)) / sqrt(n)        of n outcomes x_i in {0, 1}
    stderr of the unweighted mean of k groups = sqrt(sum_j stderr_j^2) / k

as lm-evaluation-harness has them (mean_stderr and unweighted_mean_stderr of lm_eval/api/metrics.py, 0.4.13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emo.common.errors import UserError
from emo.eval import store
from emo.eval.results import Model

Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The data and task files that rows of results can be read from again.

    data: as `run` has it. tasks: names or files of tasks, by the task's name; others are built in.
    """

    data: str
    tasks: dict[str, str]


@dataclass(frozen=True)
class Accuracy:
    """Share of right rows."""

    value: float
    stderr: float | None  # None: there are too few rows to tell
    n: int


@dataclass(frozen=True)
class Figures:
    """The result of a task. A task with groups is scored by their unweighted mean."""

    task: str
    result: dict[str, Any]
    records: list[Record]  # in row order
    accuracy: Accuracy
    groups: dict[str, Accuracy]  # empty where the task has none
    finished: float  # seconds since the epoch

    @property
    def setting(self) -> str:
        """Under what the model was asked, for a reader."""
        result, compared = self.result, self.result["conditions"]["compared"]
        text = f"{result['shots']}-shot, demonstrations: {result['retriever']}, prompts: {result['version']}"
        return f"{text}, scorer: {compared['scorer']}; the label with the lowest {result['score']} counts"


def accuracy(right: Sequence[bool]) -> Accuracy:
    """Accuracy of outcomes [n], n > 0, with the standard error of their mean."""
    n, mean = len(right), sum(right) / len(right)
    stderr = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
    return Accuracy(mean, stderr, n)


def unweighted_mean(groups: Sequence[Accuracy]) -> Accuracy:
    """The mean over groups, each weighing alike."""
    stderrs = [group.stderr for group in groups]
    finite = [stderr for stderr in stderrs if stderr is not None]
    value = sum(group.value for group in groups) / len(groups)
    stderr = math.sqrt(sum(s * s for s in finite)) / len(groups) if len(finite) == len(groups) else None
    return Accuracy(value, stderr, sum(group.n for group in groups))


def figures(model: Model, task: str) -> Figures:
    """Return the result of a task from its rows. UserError when these are damaged, or give another result."""
    result, records = model.results[task], model.records(task)
    again = "evaluate it again, which computes it anew"
    where = f"{model.name}, {task}"
    right = [record["prediction"] == record["gold"] for record in records]
    groups: dict[str, Accuracy] = {}
    if result["groups"]:
        of_group: dict[str, list[bool]] = {}
        for record, correct in zip(records, right, strict=True):
            of_group.setdefault(record["group"], []).append(correct)
        groups = {name: accuracy(of_group[name]) for name in sorted(of_group)}
        mean = unweighted_mean(list(groups.values()))
    else:
        mean = accuracy(right)
    if not math.isclose(mean.value, result["accuracy"], abs_tol=1e-9):
        raise UserError(f"{where}: its records do not give the accuracy of its result; {again}")
    try:
        finished = (model.out / store.STORE / model.keys[task] / store.RESULT).stat().st_mtime
    except FileNotFoundError:
        raise UserError(f"{where} has rows, but no finished result; {again}") from None
    return Figures(task, result, records, mean, groups, finished)


def all_figures(model: Model) -> list[Figures]:
    """Every result of a model. UserError where there is none, or one that cannot be trusted."""
    for task, fault in model.unreadable.items():
        raise UserError(f"{model.name}, {task}: {fault}")
    if not model.results:
        raise UserError(f"{model.name} has no finished result; evaluate it, or leave it out with --name")
    return [figures(model, task) for task in sorted(model.results)]
