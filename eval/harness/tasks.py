"""Names of lm-evaluation-harness's tasks. `lm_eval` is imported only for names with the prefix.

lm-eval:hellaswag        a task, group or tag of the installed lm-eval
lm-eval:path/mine.yaml   a task or group file, which may refer to others in its directory
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from emo.common.cli.progress import show_activity
from emo.common.errors import UserError, one_line
from emo.common.io.files import sha256

from ..icl.tasks import ForeignTask, Task, select_tasks
from ..results.directory import TaskResult

PREFIX = "lm-eval:"
CODE = (".yaml", ".yml", ".py")  # endings of the files of a task
LENGTHS = ("positions:", "passkey:")  # prefixes of measures over lengths


class HarnessTask(ForeignTask):
    """A task or group. spec: its name, or the path of its file."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.path = Path(spec) if spec.endswith((".yaml", ".yml")) else None
        self.title = self.path.stem if self.path else spec
        self.name = PREFIX + self.title.replace("/", "_")

    def fingerprint(self) -> Any:
        """Return the version of lm-eval, and digests of the task's file and of those next to it."""
        files = sorted(p for p in self.path.parent.glob("*") if p.suffix in CODE) if self.path else []
        digests = {file.name: sha256(file) for file in files}
        return [metadata.version("lm_eval"), digests]

    def load(self) -> Any:
        """Return the tasks and groups as lm_eval.evaluate needs them, with their data."""
        manager = _manager(self.path and self.path.parent)
        try:
            with show_activity(f"{self.name}: loading"):
                return manager.load([self.spec if self.path is None else _name_in(manager, self.path)])
        except Exception as error:  # a task may load its data with any code
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise UserError(f"lm-eval cannot load {self.spec}: {reason}", code="lm-eval") from None

    def evaluate(self, job: Any) -> TaskResult:
        """Return the result of the model of a `Job`, as ForeignTask.evaluate does."""
        from .scoring import evaluate_harness_task, seed

        seed()  # also for the order of rows
        return evaluate_harness_task(self.name, self.title, self.load(), job)


def select_all(names: str, version: str = "paper") -> Sequence[Task | ForeignTask]:
    """Return the tasks in a comma-separated list: ours, measures over lengths, and lm-eval's.

    Raises UserError for an unknown name, and if lm-eval is needed but not installed.
    """
    parts = [part.strip() for part in names.split(",") if part.strip()]
    if measures := [part for part in parts if part.startswith(LENGTHS)]:
        from ..icl.lengths import length_task

        lengths = [length_task(part) for part in measures]
        if len({task.name for task in lengths}) < len(lengths):
            raise UserError(f"--tasks names two files with the same name: {names}", code="task")
        others = ",".join(part for part in parts if part not in measures)
        return [*(select_all(others, version) if others else []), *lengths]
    specs = [part.removeprefix(PREFIX) for part in parts if part.startswith(PREFIX)]
    if not specs:
        return select_tasks(names, version)
    if util.find_spec("lm_eval") is None:
        raise UserError(
            f"tasks with the prefix {PREFIX} need the package lm-eval: pip install 'emo-pipeline[lm-eval]'",
            code="missing-extra",
        )
    own = ",".join(part for part in parts if not part.startswith(PREFIX))
    foreign = [HarnessTask(name) for spec in specs for name in _resolve(spec)]
    if len({task.name for task in foreign}) < len(foreign):
        raise UserError(f"--tasks contains a task twice: {names}", code="task")
    return [*(select_tasks(own, version) if own else []), *foreign]


def _resolve(spec: str) -> list[str]:
    """Return the tasks of a tag, or `spec` itself if it is the name or file of a task or group."""
    if spec.endswith((".yaml", ".yml")):
        if not Path(spec).is_file():
            raise UserError(f"the lm-eval task file {spec} does not exist", code="lm-eval")
        return [spec]
    manager = _manager(None)
    if spec in manager.all_tags:
        return sorted(manager.task_index[spec].tags)
    if spec not in manager.all_tasks:
        near = difflib.get_close_matches(spec, manager.all_tasks, 3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists the names."
        raise UserError(f"lm-eval has no task {spec!r}. {hint}", code="lm-eval")
    return [spec]


def _name_in(manager: Any, path: Path) -> str:
    """Return the name of the task or group in a file. lm-eval loads groups by their name only."""
    files = {entry.yaml_path.resolve(): name for name, entry in manager.task_index.items() if entry.yaml_path}
    if path.resolve() not in files:
        raise ValueError("the file has neither `task` nor `group`")
    return files[path.resolve()]


@functools.cache
def _manager(directory: Path | None) -> Any:
    """Return lm-eval's index of the tasks in `directory`, or of its own tasks, which takes seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with show_activity("lm-eval: reading the list of tasks"):
        from lm_eval.tasks import TaskManager

        path = None if directory is None else str(directory)
        return TaskManager(include_path=path, include_defaults=path is None)
