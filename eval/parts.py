"""The parts of an evaluation that runs on several hosts: some of its tasks each. The report comes last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError
from emo.common.io.lease import wait_and_hold
from emo.common.on_ray import connect, run_tasks

from .icl.job import run_all
from .icl.settings import Settings
from .icl.tasks import ForeignTask, Task
from .models.base import Say
from .models.model import EvaluatedModel
from .report.gather import Report
from .report.page import FILES, document
from .results.directory import MODELS, TaskResult, find_model, read_models
from .results.store import STORE, lease


class Evaluation(NamedTuple):
    """An evaluation whose tasks can run on different hosts. Paths may be relative to `directory`."""

    model: str
    name: str | None
    dtype: str
    tasks: Sequence[Task | ForeignTask]
    settings: Settings
    out: Path
    directory: Path


def evaluate_on_ray(evaluation: Evaluation, say: Say) -> None:
    """Evaluate each task in a task of Ray, which has a GPU if the cluster has any."""
    with connect():
        for _, lines in run_tasks(_evaluate, evaluation, range(len(evaluation.tasks)), gpus=True):
            for line in lines:
                say(line)


def _evaluate(evaluation: Evaluation, number: int) -> list[str]:
    """In a task of Ray: evaluate one task and return the lines about it."""
    try:
        os.chdir(evaluation.directory)
    except OSError:
        problem = f"{evaluation.directory} does not exist on all nodes of the Ray cluster"
        cure = "Run the command in a directory that they share"
        raise UserError(f"{problem}. {cure}", code="not-shared") from None
    lines: list[str] = []
    model = EvaluatedModel(evaluation.model, evaluation.name, evaluation.dtype)
    run_all(model, [evaluation.tasks[number]], evaluation.settings, evaluation.out, lines.append)
    return lines


def read_results(name: str, tasks: Sequence[Task | ForeignTask], out: Path) -> list[TaskResult] | None:
    """Return the results of a model, or None if a task has none yet."""
    if not (out / MODELS / name).is_dir():
        return None
    results = find_model(read_models([out]), name).all_results
    return [results[task.name] for task in tasks] if all(task.name in results for task in tasks) else None


class _KnownModel(EvaluatedModel):
    """A model whose results are all known, so that its weights are not loaded."""

    def _load(self) -> Any:
        raise _missing_error(self.name)


def _missing_error(name: str) -> UserError:
    return UserError(
        f"a results directory does not have all results of {name} with these weights and settings. "
        "Run the missing parts, or set an --output_path that all hosts share",
        code="not-shared",
    )


def require_results(evaluation: Evaluation, name: str) -> list[TaskResult]:
    """Return the results of all parts. Raises UserError if one is missing or was made with other settings."""
    if read_results(name, evaluation.tasks, evaluation.out) is None:  # before demonstrations are chosen
        raise _missing_error(name)
    model = _KnownModel(evaluation.model, evaluation.name, evaluation.dtype)
    return run_all(model, evaluation.tasks, evaluation.settings, evaluation.out, lambda line: None)


def write_report(out: Path) -> Path | None:
    """Write the report of a results directory. The last of several parts to end covers all of them."""
    with wait_and_hold(lease(out / STORE / "leases", "report"), None):
        return document(Report([out])).write(f"{out}/", FILES)
