"""Scores of a run's checkpoints on tasks, which `emo watch` appends to task_scores.jsonl.

At each save point rank 0 reads the scores that have arrived, and appends the accepted ones to
selection.jsonl. A run that resumes from an earlier checkpoint finds that record and takes the same scores at
the same save points.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import FailureError, one_line
from emo.common.io.untrusted import number

from ...checkpoint.config import TASK
from ...control.run_dir import (
    SELECTION,
    TASK_SCORES,
    Best,
    append_records,
    checkpoint_digest,
    checkpoints,
    read_records,
    step_of,
)
from ...control.world import World, gather_objects, raise_on_all_ranks

log = logging.getLogger(__name__)


class Score(NamedTuple):
    """The score of a checkpoint on a task."""

    task: str
    step: int
    value: float
    setting: str  # digest of the settings of the evaluation


class TaskScores:
    """The scores that a run has taken, the same on all ranks."""

    def __init__(self, run_dir: Path, metrics: Sequence[str | None], world: World) -> None:
        """Start without scores.

        Args:
            run_dir: The run directory.
            metrics: The metrics that the run chooses by. Those of tasks begin with `task:`.
            world: This process among the ranks.
        """
        names = (metric.removeprefix(TASK) for metric in metrics if metric and metric.startswith(TASK))
        self.tasks = list(dict.fromkeys(names))
        self._run_dir = run_dir
        self._world = world
        self._values: dict[str, dict[int, float]] = {task: {} for task in self.tasks}  # by task and step
        self._settings: dict[str, str] = {}
        self._warned = False

    def take(self, step: int, final: bool) -> None:
        """Take the scores that have arrived; all ranks must call.

        Args:
            step: The step of the save point.
            final: Whether the run now chooses the checkpoint to export.

        Raises FailureError on all ranks if the decision cannot be recorded.
        """
        is_main = self._world.is_main
        taken = raise_on_all_ranks(lambda: self._read_decision(step, final) if is_main else [])
        for score in gather_objects(taken)[0]:
            self._set(Score(*score))

    def best(self, metric: str) -> Best | None:
        """Return the checkpoint with the highest score for a metric of a task, the earliest of equals."""
        values = self._values[metric.removeprefix(TASK)]
        step = max(values, key=lambda step: (values[step], -step), default=None)
        return None if step is None else Best(step, metric, values[step])

    def count_after_best(self, metric: str) -> int:
        """Return the number of scored checkpoints after the best one."""
        best = self.best(metric)
        return sum(best is not None and step > best.step for step in self._values[metric.removeprefix(TASK)])

    def forget(self, metric: str) -> None:
        """Drop the scores for a metric of a task, whose best checkpoint is gone."""
        self._values[metric.removeprefix(TASK)].clear()

    def find_unscored(self) -> list[int]:
        """Return the steps of complete checkpoints without a score on some task, ascending."""
        steps = map(step_of, checkpoints(self._run_dir))
        return [step for step in steps if any(step not in values for values in self._values.values())]

    def choose_waiting(self, keep_last: int, keep_every: int) -> list[int]:
        """Return the checkpoints that must survive the next save because they wait for a score.

        These are the newest `keep_last` of the checkpoints that would be deleted. Warns once if more wait.
        """
        newest = [step_of(path) for path in checkpoints(self._run_dir)][1 - keep_last :]
        kept = newest if keep_last > 1 else []
        waiting = [s for s in self.find_unscored() if s not in kept and (not keep_every or s % keep_every)]
        if len(waiting) > keep_last and not self._warned:
            self._warned = True
            problem = f"step-{waiting[0]:06d} is deleted without a score on {', '.join(self.tasks)}"
            cause = f"more than {keep_last} checkpoints wait for scores of `emo watch {self._run_dir}`"
            log.warning("%s, because %s. Raise train.save_total_limit to keep more", problem, cause)
        return waiting[-keep_last:]

    def state_dict(self) -> dict[str, object]:
        """Return the scores that were taken, as JSON can hold them."""
        return {
            task: [self._settings.get(task), sorted(values.items())] for task, values in self._values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the scores of a checkpoint, for tasks that are still used."""
        for task in self.tasks:
            setting, values = state.get(task, (None, ()))
            for step, value in values:
                self._set(Score(task, step, value, setting))

    def _set(self, score: Score) -> None:
        if self._settings.setdefault(score.task, score.setting) != score.setting:  # not comparable
            self._values[score.task].clear()
            self._settings[score.task] = score.setting
        self._values[score.task][score.step] = score.value

    def _read_decision(self, step: int, final: bool) -> list[Score]:
        """Return the scores that were taken at this save point, or else take and record new ones."""
        point = {"step": step, "final": final, "tasks": self.tasks}
        # The last decision stands only with its export, which the run would not repeat.
        for record in [] if final else read_records(self._run_dir / SELECTION)[0]:
            if {key: record.get(key) for key in point} == point:
                return [Score(*score) for score in record["taken"]]
        taken = [score for task in self.tasks for score in self._find_new(task, step)]
        try:
            append_records(self._run_dir / SELECTION, [point | {"taken": taken}])
        except OSError as error:
            problem = f"{self._run_dir / SELECTION} cannot be written ({one_line(error, 120)})"
            raise FailureError(problem, code="save-failed") from None
        return taken

    def _find_new(self, task: str, step: int) -> list[Score]:
        """Return scores on a task with the newest setting, of the checkpoints that exist up to `step`."""
        records = [r for r in read_records(self._run_dir / TASK_SCORES)[0] if r.get("task") == task]
        digests = {step_of(path): checkpoint_digest(path) for path in checkpoints(self._run_dir)}
        found: dict[int, Score] = {}
        for record in records:
            value = number(record.get("value"))
            same = record.get("setting") == records[-1].get("setting")
            if value is not None and same and digests.get(record["step"]) == record.get("checkpoint"):
                found[record["step"]] = Score(task, record["step"], value, str(record.get("setting")))
        known = self._values[task] if records and self._settings.get(task) == records[-1]["setting"] else {}
        return [found[s] for s in sorted(found) if s <= step and s not in known]
