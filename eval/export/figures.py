"""Exported results: accuracies with standard errors, recomputed from the records of the store.

    stderr = sqrt(sum_i (x_i - mean)^2 / (n - 1)) / sqrt(n)        of n outcomes x_i in {0, 1}
    stderr of the unweighted mean of k groups = sqrt(sum_j stderr_j^2) / k

as in lm-evaluation-harness (mean_stderr and unweighted_mean_stderr of lm_eval/api/metrics.py, 0.4.13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from emo.common.errors import UserError

from ..results import store
from ..results.directory import Model, Record, RowSource, TaskResult, is_right


@dataclass(frozen=True)
class ExportedAccuracy:
    """Share of correct rows. stderr: None if there are too few rows."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Figures:
    """The result of a task. Its accuracy is the unweighted mean over its groups."""

    task: str
    result: TaskResult
    records: list[Record]  # in row order
    accuracy: ExportedAccuracy
    groups: dict[str, ExportedAccuracy]  # {"": accuracy} if the task has none
    rows: RowSource
    finished: float  # seconds since the epoch

    @property
    def mean(self) -> str:
        """Description of the mean over groups, or "" if the task has none."""
        return f"unweighted mean of {len(self.groups)} groups" if self.result["groups"] else ""

    @property
    def by_harness(self) -> bool:
        """Whether lm-evaluation-harness defines the task."""
        return "metrics" in self.result

    @property
    def setting(self) -> str:
        """Description of the settings of the evaluation."""
        result = self.result
        compared = self.result["conditions"]["compared"]
        if self.by_harness:
            text = f"{result['shots']}-shot, metric {result['score']}, scorer: {compared['scorer']}"
            return f"{text}; {self.lost}" if self.lost else text
        text = f"{result['shots']}-shot, demonstrations: {result['retriever']}, prompts: {result['version']}"
        text = f"{text}, scorer: {compared['scorer']}; the label with the lowest {result['score']} wins"
        return f"{text}; {self.lost}" if self.lost else text

    @property
    def lost(self) -> str:
        """Description of the prompts that were shortened, or ""."""
        lost = self.result["rows_shortened"]
        n = len(self.records)
        return f"{lost:,} of {n:,} prompts lost demonstrations or text to the context" if lost else ""


def read_figures(model: Model) -> list[Figures]:
    """Return every result of a model, recomputed from its records.

    Raises UserError if there is none, or if one is unreadable or does not match its records.
    """
    for task, fault in model.unreadable.items():
        raise UserError(f"{model.name}, {task}: {fault}", code="incomplete-results")
    if not model.results:
        raise UserError(
            f"{model.name} has no finished result. Evaluate it, or select another model with --name.",
            code="no-results",
        )
    return [_read_task(model, task) for task in sorted(model.views)]


def _read_task(model: Model, task: str) -> Figures:
    view = model.views[task]
    result = view["result"]
    records = model.read_records(task)
    outcomes: dict[str, list[bool]] = {}
    for record in records:
        group = record["group"] if result["groups"] else ""
        outcomes.setdefault(group, []).append(is_right(record))
    groups = {group: _accuracy(correct) for group, correct in sorted(outcomes.items())}
    mean = sum(group.value for group in groups.values()) / len(groups)
    errors = [group.stderr for group in groups.values() if group.stderr is not None]
    stderr = math.sqrt(sum(error**2 for error in errors)) / len(groups)
    accuracy = ExportedAccuracy(mean, stderr if len(errors) == len(groups) else None, len(records))
    if not math.isclose(mean, result["accuracy"], abs_tol=1e-9):
        raise UserError(
            f"{model.name}, {task}: its records do not match the accuracy of its result. Evaluate it again, "
            "which recomputes it.",
            code="incomplete-results",
        )
    finished = (model.out / store.STORE / view["key"] / store.RESULT).stat().st_mtime
    return Figures(task, result, records, accuracy, groups, view["rows"], finished)


def _accuracy(correct: list[bool]) -> ExportedAccuracy:
    n = len(correct)
    share = sum(correct) / len(correct)
    return ExportedAccuracy(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None, n)
