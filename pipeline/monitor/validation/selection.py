"""The best checkpoint of a run by a metric (`train.keep_best`), and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.config import TASK, SavingConfig
from ...control.run_dir import Best
from ...control.world import World
from ...engine.totals import StepTotals
from ..component import Component
from ..metrics import means_per_token
from .task_scores import TaskScores

log = logging.getLogger(__name__)


class Selection(Component):
    """Remembers the validation with the lowest value, and how many have passed without a lower one.

    For a metric of a task it remembers the checkpoint with the highest score. It is the same on all ranks,
    because their totals and scores are.
    """

    name = "selection"

    def __init__(self, train: SavingConfig, run_dir: Path, world: World) -> None:
        self._metric = train.keep_best
        self._stopping = train.early_stopping
        stopping = None if train.early_stopping is None else train.early_stopping.metric
        self.scores = TaskScores(run_dir, (self._metric, stopping), world)
        self._by_task = self._metric is not None and self._metric.startswith(TASK)
        self._stops_by_task = stopping is not None and stopping.startswith(TASK)
        self.best: Best | None = None
        self._lowest = math.inf
        self._waited = 0
        self._tokens: dict[str, int] | None = None  # by validation set, of the last validation

    @property
    def exhausted(self) -> bool:
        """Return whether early_stopping ends the run."""
        return self._stopping is not None and self._waited >= self._stopping.patience

    def compare(self, step: int, measured: Mapping[str, StepTotals]) -> bool:
        """Take note of a validation after `step` steps. Return whether its checkpoint is now the best one."""
        tokens = {name: totals.tokens for name, totals in measured.items()}
        if self._tokens not in (None, tokens):
            self._forget_values(step)
        self._tokens = tokens
        if self._stopping is not None and not self._stops_by_task:
            value = read_metric(measured, self._stopping.metric)
            improved = value < self._lowest
            self._waited = 0 if improved else self._waited + 1
            self._lowest = min(value, self._lowest) if improved else self._lowest
            if self.exhausted:
                line = "step %d: no lower %s for %d validations, so early_stopping ends the run"
                log.info(line, step, self._stopping.metric, self._waited)
        if self._metric is None or self._by_task or not step:  # before the first step there is no checkpoint
            return False
        value = read_metric(measured, self._metric)
        improved = math.isfinite(value) and (self.best is None or value < self.best.value)
        if improved:
            self.best = Best(step, self._metric, value)
        return improved

    def _forget_values(self, step: int) -> None:
        """Forget values that were measured on other rows, because they cannot be compared with new ones."""
        log.warning("step %d: validation reads other rows than before, so earlier values do not count", step)
        self._lowest = math.inf
        if not self._stops_by_task:
            self._waited = 0
        if not self._by_task:
            self.forget_best()

    def take_scores(self, step: int, final: bool = False) -> None:
        """Take the scores of tasks that have arrived by the save point of `step`. All ranks must call.

        final: whether this is the choice of the checkpoint to export.
        """
        if not self.scores.tasks:
            return
        self.scores.take(step, final)
        if self._by_task and self._metric is not None:
            self.best = self.scores.best(self._metric)
        if self._stops_by_task and self._stopping is not None:
            before = self.exhausted
            self._waited = self.scores.count_after_best(self._stopping.metric)
            if self.exhausted and not before and not final:
                line = "step %d: no higher %s for %d checkpoints, so early_stopping ends the run"
                log.info(line, step, self._stopping.metric, self._waited)

    def forget_best(self) -> None:
        """Compare later checkpoints without the best one, which is gone."""
        self.best = None
        if self._by_task and self._metric is not None:
            self.scores.forget(self._metric)

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {"best": self.best, "tokens": self._tokens}
        if self.scores.tasks:
            state["scores"] = self.scores.state_dict()
        if self._stopping is not None:
            lowest = self._lowest if math.isfinite(self._lowest) else None
            state |= {"metric": self._stopping.metric, "lowest": lowest, "waited": self._waited}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens = state.get("tokens")
        if state["best"] is not None and state["best"][1] == self._metric:
            self.best = Best(*state["best"])
        self.scores.load_state_dict(state.get("scores", {}))
        if self._stopping is not None and state.get("metric") == self._stopping.metric:
            self._lowest = math.inf if state["lowest"] is None else state["lowest"]
            self._waited = state["waited"]


def read_metric(measured: Mapping[str, StepTotals], metric: str) -> float:
    """Return `nll`, a mean over the validation sets, or `SET/nll`. NaN if it was not measured."""
    name, _, key = metric.rpartition("/")
    sets = [measured[name]] if name else list(measured.values())
    values = [means_per_token(totals, totals.divisor).get(key, math.nan) for totals in sets]
    return sum(values) / len(values)
