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


@dataclass(frozen=True)
class Source:
    """The data and task files that rows of results can be read from again.

    data: as `emo eval` has it. tasks: names or files of tasks, by the task's name; others are built in.
    """

    data: str
    tasks: dict[str, str]


@dataclass(frozen=True)
class Accuracy:
    """Share of right rows. stderr: None where there are too few rows to tell."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Figures:
    """The result of a task. A task with groups is scored by their unweighted mean."""

    task: str
    result: dict[str, Any]
    records: list[dict[str, Any]]  # in row order
    accuracy: Accuracy
    groups: dict[str, Accuracy]  # empty where the task has none
    finished: float  # seconds since the epoch

    @property
    def setting(self) -> str:
        """Return under what the model was asked, for a reader."""
        result, compared = self.result, self.result["conditions"]["compared"]
        text = f"{result['shots']}-shot, demonstrations: {result['retriever']}, prompts: {result['version']}"
        return f"{text}, scorer: {compared['scorer']}; the label with the lowest {result['score']} counts"


def accuracy(right: Sequence[bool]) -> Accuracy:
    """Return the accuracy of outcomes [n], n > 0, with the standard error of their mean."""
    n, mean = len(right), sum(right) / len(right)
    return Accuracy(mean, math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None, n)


def unweighted_mean(groups: Sequence[Accuracy]) -> Accuracy:
    """Return the mean over groups, each weighing alike."""
    value, stderr = sum(group.value for group in groups) / len(groups), None
    if all(group.stderr is not None for group in groups):
        stderr = math.sqrt(sum((group.stderr or 0) ** 2 for group in groups)) / len(groups)
    return Accuracy(value, stderr, sum(group.n for group in groups))


def all_figures(model: Model) -> list[Figures]:
    """Return every result of a model, from its rows.

    Raises UserError where there is none, one cannot be read, or one does not follow from its rows.
    """
    for task, fault in model.unreadable.items():
        raise UserError(f"{model.name}, {task}: {fault}")
    if not model.results:
        raise UserError(f"{model.name} has no finished result; evaluate it, or leave it out with --name")
    figures = []
    for task, result in sorted(model.results.items()):
        records = model.records(task)
        right = [record["prediction"] == record["gold"] for record in records]
        by_group: dict[str, list[bool]] = {}
        for record, correct in zip(records, right, strict=True):
            by_group.setdefault(record["group"], []).append(correct)
        groups = {name: accuracy(by_group[name]) for name in sorted(by_group)} if result["groups"] else {}
        mean = unweighted_mean(list(groups.values())) if groups else accuracy(right)
        if not math.isclose(mean.value, result["accuracy"], abs_tol=1e-9):
            raise UserError(
                f"{model.name}, {task}: its records do not give the accuracy of its result; evaluate it "
                "again, which computes it anew"
            )
        finished = (model.out / store.STORE / model.keys[task] / store.RESULT).stat().st_mtime
        figures.append(Figures(task, result, records, mean, groups, finished))
    return figures
